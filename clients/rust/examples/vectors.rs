//! Checks this crate against nanocore's test vectors: `vectors FILE`. Every message is decoded and
//! compared with what it means; canonical ones are encoded again, byte by byte; and engines' ones go
//! through a session with an engine that sends nothing else, which must end only by malformed ones.

use nanocore_client::wire::*;
use nanocore_client::{Engine, Error, Options};
use serde::{de::DeserializeOwned, Serialize};
use serde_json::Value as Json;
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
        let frames = frames.iter().map(|frame| unhex(frame.as_str().expect("hex"))).collect();
        Vector { name: json["name"].as_str().expect("name").into(), frames, json }
    };
    text.lines().map(vector).collect()
}

/// Whether a field may be missing on one side: its value says what its absence says.
fn is_default(field: &str, value: &Json) -> bool {
    match field {
        "temperature" | "top_p" => value.as_f64() == Some(1.0),
        "ok" => value == &Json::Bool(true),
        "max_request_id_chars" => value == &Json::from(256),
        "max_cache_salt_chars" => value == &Json::from(1024),
        "max_file_chunk_bytes" => value == &Json::from(65536),
        "default_sampling" => same(value, &serde_json::json!({})),
        "counts" => value.is_null(),
        _ => match value {
            Json::Null => true,
            Json::Bool(value) => !value,
            Json::Number(value) => value.as_f64() == Some(0.0),
            Json::String(value) => value.is_empty(),
            Json::Array(value) => value.is_empty(),
            Json::Object(_) => false,
        },
    }
}

/// Whether a message is what it should be; bytes are hex in `expected`, numbers in `actual`.
fn same(expected: &Json, actual: &Json) -> bool {
    match (expected, actual) {
        (Json::Object(expected), Json::Object(actual)) => {
            actual.iter().all(|(key, value)| expected.get(key).map_or(false, |e| same(e, value)))
                && expected.iter().all(|(key, e)| actual.contains_key(key) || is_default(key, e))
        }
        (Json::String(expected), Json::Array(actual)) => {
            let bytes = unhex(expected);
            bytes.len() == actual.len()
                && bytes.iter().zip(actual).all(|(b, a)| a == &Json::from(*b))
        }
        (Json::Array(expected), Json::Array(actual)) => {
            expected.len() == actual.len() && expected.iter().zip(actual).all(|(e, a)| same(e, a))
        }
        (Json::Number(expected), Json::Number(actual)) if actual.is_f64() => {
            expected.as_f64() == actual.as_f64()
        }
        (expected, actual) => expected == actual,
    }
}

/// Whether the same fields were written, in the same order.
fn whole(expected: &Json, actual: &Json) -> bool {
    match (expected, actual) {
        (Json::Object(expected), Json::Object(actual)) => {
            expected.keys().eq(actual.keys())
                && expected.values().zip(actual.values()).all(|(e, a)| whole(e, a))
        }
        (Json::Array(expected), Json::Array(actual)) => {
            expected.iter().zip(actual).all(|(expected, actual)| whole(expected, actual))
        }
        _ => true,
    }
}

/// Decodes, compares and encodes a valid message. Returns what was done besides decoding.
fn check<T: DeserializeOwned + Serialize + PartialEq>(v: &Vector) -> Result<&'static str, String> {
    let message: T = decode(&v.frames[1]).map_err(|error| error.to_string())?;
    let actual = serde_json::to_value(&message).map_err(|error| error.to_string())?;
    let expected = &v.json["message"];
    if !same(expected, &actual) {
        return Err(format!("decoded {actual}, not {expected}"));
    }
    let encoded = encode(&message);
    if decode::<T>(&encoded).as_ref() != Ok(&message) {
        return Err("is another message after encoding and decoding".into());
    }
    if v.json["canonical"] != Json::Bool(true) {
        return Ok("decoded");
    }
    if !whole(expected, &actual) {
        return Ok("decoded (canonical, but in another order or with defaults that are not sent)");
    }
    match encoded == v.frames[1] {
        true => Ok("decoded and encoded byte by byte"),
        false => Err(format!("encoded {encoded:02x?}, not {:02x?}", v.frames[1])),
    }
}

fn check_valid(vector: &Vector) -> Result<&'static str, String> {
    match vector.frames[0][0] {
        Hello::OP => check::<Hello>(vector),
        Welcome::OP => check::<Welcome>(vector),
        Refused::OP => check::<Refused>(vector),
        Submit::OP => check::<Submit>(vector),
        Accepted::OP => check::<Accepted>(vector),
        Output::OP => check::<Output>(vector),
        Failure::OP => check::<Failure>(vector),
        Abort::OP => check::<Abort>(vector),
        Ping::OP => check::<Ping>(vector),
        Pong::OP => check::<Pong>(vector),
        Control::OP => check::<Control>(vector),
        Reply::OP => check::<Reply>(vector),
        Bye::OP => check::<Bye>(vector),
        op => Err(format!("op 0x{op:02x} is none")),
    }
}

/// Welcomes one client after another, sends each its messages, and reads until all are gone.
fn serve(router: zmq::Socket, welcome: Frames, sessions: Vec<Vec<Frames>>) {
    let mut sessions = sessions.into_iter();
    let mut num_open = sessions.len();
    while num_open > 0 {
        let mut received = router.recv_multipart(0).expect("a client's message");
        match received[1][..] {
            [Hello::OP] => {
                let messages = sessions.next().expect("a client per session");
                for mut frames in std::iter::once(welcome.clone()).chain(messages) {
                    frames.insert(0, received[0].clone());
                    router.send_multipart(frames, 0).expect("room for a message");
                }
            }
            [Bye::OP] => num_open -= 1,
            _ => received.clear(), // what the clients send is not looked at
        }
    }
}

/// How a session ends in which the engine sends, after its WELCOME, one message and BYE.
fn session(endpoint: &str) -> Error {
    let mut engine =
        Engine::connect(endpoint, &Options::default()).expect("the engine welcomes everyone");
    loop {
        if let Err(error) = engine.control("stats", None, 0) {
            return error;
        }
    }
}

fn check_sessions(vectors: &[&Vector]) -> Vec<Result<&'static str, String>> {
    let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
    router.bind("ipc://*").expect("a place for a socket");
    let endpoint = router.get_last_endpoint().expect("an endpoint").expect("text");
    let welcome = vectors.iter().find(|v| v.name == "engine-welcome-full").expect("a WELCOME");
    let welcome = welcome.frames.clone();
    let bye = vec![vec![Bye::OP], vec![0x80]];
    let sessions = vectors.iter().map(|v| vec![v.frames.clone(), bye.clone()]).collect();
    let engine = thread::spawn(move || serve(router, welcome, sessions));
    let check = |vector: &&Vector| {
        let error = session(&endpoint);
        match (vector.json.get("error").is_some(), &error) {
            (true, Error::Protocol(_)) => Ok("malformed, and refused in a session"),
            (false, Error::Dead(_) | Error::Engine(_) | Error::Refused(_)) => {
                Ok("valid, and taken in a session")
            }
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
    let mut results: Vec<_> = valid.map(|v| (v, check_valid(v))).collect();
    let engines: Vec<_> = vectors.iter().filter(|v| v.json["sender"] == "engine").collect();
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
