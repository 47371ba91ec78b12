//! Checks this crate against nanocore's test vectors: `vectors FILE`. Clients' canonical messages are
//! encoded; engines' ones go through a session with an engine that sends nothing else: valid ones
//! must not end it, malformed ones must, unless they are marked as strict.

use nanocore_client::{json, Engine, Error, Raw, Value as Json};
use std::collections::BTreeMap;
use std::thread;

type Frames = Vec<Vec<u8>>;

struct Vector {
    name: String,
    frames: Frames,
    json: Json,
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex digits");
    (0..text.len()).step_by(2).map(byte).collect()
}

fn read(path: &str) -> Vec<Vector> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let vector = |line| {
        let json: Json = serde_json::from_str(line).expect("a line is a JSON object");
        let frames = json["frames"].as_array().expect("frames");
        let frames = frames
            .iter()
            .map(|frame| unhex(frame.as_str().expect("hex")))
            .collect();
        Vector {
            name: json["name"].as_str().expect("name").into(),
            frames,
            json,
        }
    };
    text.lines().map(vector).collect()
}

fn is_canonical(vector: &Vector) -> bool {
    vector.json["canonical"] == true
}

/// Encodes a client's message as a session does: with sorted keys, otherwise in the shortest forms.
fn check_clients(vector: &Vector) -> Result<&'static str, String> {
    let mut raw: Raw = serde_json::from_value(vector.json["message"].clone()).expect("JSON is raw");
    for name in ["prompt_token_ids", "output_token_ids", "handles"] {
        if let (Raw::Map(map), Some(hex)) = (&mut raw, vector.json["message"][name].as_str()) {
            map.insert(name.into(), Raw::Bin(unhex(hex)));
        }
    }
    let encoded = rmp_serde::to_vec(&raw).expect("memory takes every message");
    let again: Raw = rmp_serde::from_slice(&encoded).map_err(|error| error.to_string())?;
    let expected: Raw = rmp_serde::from_slice(&vector.frames[1]).map_err(|e| e.to_string())?;
    if format!("{again:?}") != format!("{expected:?}") {
        return Err(format!("encoded {again:?}, not {expected:?}"));
    }
    match encoded.len() == vector.frames[1].len() {
        true => Ok("client's, canonical: encoded as that, but for the order of keys"),
        false => Err(format!(
            "encoded {encoded:02x?}, not {:02x?}",
            vector.frames[1]
        )),
    }
}

/// Welcomes one client after another, and sends each its messages.
fn serve(router: zmq::Socket, welcome: Frames, sessions: Vec<Vec<Frames>>) {
    for messages in sessions {
        let mut received = router.recv_multipart(0).expect("a client's message");
        while received[1] != [0x01] {
            received = router.recv_multipart(0).expect("a client's message");
        }
        for mut frames in std::iter::once(welcome.clone()).chain(messages) {
            frames.insert(0, received[0].clone());
            router
                .send_multipart(frames, 0)
                .expect("room for a message");
        }
    }
}

/// How a session ends in which the engine sends, after its WELCOME, one message and BYE.
fn session(endpoint: &str) -> Error {
    let mut engine = Engine::connect(endpoint, 10_000, None).expect("the engine welcomes everyone");
    loop {
        if let Err(error) = engine.control(json!({ "operation": "stats" })) {
            if error.code != "refused" || engine.poll(false).is_err() {
                return error; // a REPLY may refuse, too, and ends no session
            }
        }
    }
}

fn check_sessions(vectors: &[&Vector]) -> Vec<Result<&'static str, String>> {
    let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
    router.bind("ipc://*").expect("a place for a socket");
    let endpoint = router
        .get_last_endpoint()
        .expect("an endpoint")
        .expect("text");
    let welcome = vectors
        .iter()
        .find(|v| v.name == "engine-welcome-full")
        .expect("a WELCOME");
    let welcome = welcome.frames.clone();
    let bye = vec![vec![0x41], vec![0x80]];
    let sessions = vectors
        .iter()
        .map(|v| vec![v.frames.clone(), bye.clone()])
        .collect();
    let engine = thread::spawn(move || serve(router, welcome, sessions));
    let check = |vector: &&Vector| {
        let error = session(&endpoint);
        let is_malformed = vector.json.get("error").is_some();
        match (is_malformed, error.code == "malformed") {
            (true, true) => Ok("engine's, malformed: ended the session"),
            (true, false) if vector.json["strict"] == true => Ok("engine's, strict: taken"),
            (false, false) => Ok("engine's, valid: taken in a session"),
            _ => Err(format!("the session ended by {error:?}")),
        }
    };
    let results = vectors.iter().map(check).collect();
    engine.join().expect("the engine ends with its last client");
    results
}

fn main() {
    let path = std::env::args().nth(1).expect("usage: vectors FILE");
    let vectors = read(&path);
    let valid = vectors.iter().filter(|v| v.json.get("message").is_some());
    let canonical = valid.filter(|v| v.json["sender"] == "client" && is_canonical(v));
    let mut results: Vec<_> = canonical.map(|v| (v, check_clients(v))).collect();
    let engines: Vec<_> = vectors
        .iter()
        .filter(|v| v.json["sender"] == "engine")
        .collect();
    results.extend(engines.iter().copied().zip(check_sessions(&engines)));
    let mut counts = BTreeMap::new();
    for (vector, result) in &results {
        match result {
            Ok(done) => *counts.entry(*done).or_insert(0) += 1,
            Err(error) => println!("{}: {error}", vector.name),
        }
    }
    for (done, count) in &counts {
        println!("{count:5} {done}");
    }
    let num_failed = results.len() - counts.values().sum::<usize>();
    println!("{num_failed:5} failed");
    std::process::exit(i32::from(num_failed > 0));
}
