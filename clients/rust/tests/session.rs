//! Sessions with an engine that is a script: a ROUTER that answers as each test tells it.

use nanocore_client::{json, Engine, Error, News, Raw, TokenLogprobs, Value};
use std::thread::{self, JoinHandle};

type Frames = Vec<Vec<u8>>;

const WELCOME: u8 = 0x02;
const REFUSED: u8 = 0x03;
const OUTPUT: u8 = 0x12;
const ERROR: u8 = 0x13;
const REPLY: u8 = 0x31;

/// The engine's end of one session.
struct Peer {
    router: zmq::Socket,
    client: Vec<u8>,
}

impl Peer {
    fn receive(&mut self) -> Frames {
        let mut frames = self.router.recv_multipart(0).expect("a message");
        self.client = frames.remove(0);
        frames
    }

    /// The body of the next message, which has this op.
    fn expect(&mut self, op: u8) -> Value {
        let frames = self.receive();
        assert_eq!(frames[0], [op]);
        let body: Raw = rmp_serde::from_slice(&frames[1]).expect("a body");
        serde_json::to_value(body).expect("JSON")
    }

    fn send(&self, op: u8, body: impl serde::Serialize) {
        let body = rmp_serde::to_vec(&body).expect("a body");
        let frames = [self.client.clone(), vec![op], body];
        self.router
            .send_multipart(frames, 0)
            .expect("room for a message");
    }

    /// Waits for a SUBMIT, and accepts it under this handle.
    fn accept(&mut self, handle: u32) -> Value {
        let submit = self.expect(0x10);
        let request_id = &submit["request_id"];
        self.send(
            0x11,
            json!({ "request_id": request_id, "handle": handle, "seed": 0 }),
        );
        submit
    }
}

fn welcome() -> Value {
    let model = json!({
        "model": "tiny", "architecture": "Tiny", "dtype": "float32", "vocab_size": 4,
        "max_model_len": 8, "eos_token_ids": [3], "block_size": 16, "num_blocks": 2,
    });
    let limits = json!({
        "max_frame_bytes": 1 << 24, "max_num_seqs": 8, "ping_interval_ms": 1000,
        "session_timeout_ms": 30000,
    });
    let (protocol, session) = ([1, 6], "s");
    json!({
        "protocol": protocol, "session": session, "engine_instance": "i", "model": model,
        "limits": limits,
    })
}

/// A session, of a client with these keys, with an engine that does what `script` says after its
/// WELCOME and listens at `endpoint`.
fn session_at(
    endpoint: &str,
    router: zmq::Socket,
    keys: Option<[&str; 3]>,
    welcome: Value,
    script: impl FnOnce(&mut Peer) + Send + 'static,
) -> (Engine, JoinHandle<()>) {
    router.bind(endpoint).expect("a place for a socket");
    let endpoint = router
        .get_last_endpoint()
        .expect("an endpoint")
        .expect("text");
    let peer = thread::spawn(move || {
        let mut peer = Peer {
            router,
            client: Vec::new(),
        };
        assert_eq!(peer.expect(0x01)["protocol"], json!([1, 14]));
        peer.send(WELCOME, welcome);
        script(&mut peer);
    });
    (
        Engine::connect(&endpoint, 10_000, keys).expect("a session"),
        peer,
    )
}

fn router() -> zmq::Socket {
    zmq::Context::new().socket(zmq::ROUTER).expect("a socket")
}

fn session(script: impl FnOnce(&mut Peer) + Send + 'static) -> (Engine, JoinHandle<()>) {
    session_at("ipc://*", router(), None, welcome(), script)
}

fn bin(values: &[u32]) -> Raw {
    Raw::Bin(
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    )
}

fn map<const N: usize>(fields: [(&str, Raw); N]) -> Raw {
    Raw::Map(fields.map(|(name, value)| (name.into(), value)).into())
}

fn tokens(handles: &[u32], tokens: &[u32], counts: Option<&[u32]>) -> Raw {
    let counts = counts.map_or(Raw::Scalar(Value::Null), bin);
    map([
        ("handles", bin(handles)),
        ("tokens", bin(tokens)),
        ("counts", counts),
    ])
}

fn ends(handles: &[u32]) -> Value {
    let end = |handle| json!({ "handle": handle, "finish_reason": "length" });
    json!({ "events": handles.iter().map(end).collect::<Vec<_>>() })
}

fn told(handle: u32, token_ids: &[i32]) -> Result<Option<News>, Error> {
    Ok(Some(News {
        handle,
        token_ids: token_ids.into(),
        ..News::default()
    }))
}

fn ended(handle: u32) -> Result<Option<News>, Error> {
    Ok(Some(News {
        handle,
        finish_reason: Some("length".into()),
        ..News::default()
    }))
}

fn control(engine: &mut Engine, operation: &str) -> Result<(Value, Vec<u8>), Error> {
    engine.control(json!({ "operation": operation }))
}

#[test]
fn outputs_reach_the_requests_they_are_for() {
    let (mut engine, peer) = session(|peer| {
        assert_eq!(
            peer.accept(7)["prompt_token_ids"],
            json!([1, 0, 0, 0, 2, 1, 0, 0])
        );
        assert_eq!(peer.accept(u32::MAX)["sampling"], json!({ "top_k": 4 }));
        peer.send(
            OUTPUT,
            tokens(&[u32::MAX, 9, 7], &[1, 2, 3, 4, 5], Some(&[2, 1, 2])),
        );
        peer.send(OUTPUT, tokens(&[7], &[u32::MAX], None));
        peer.send(
            OUTPUT,
            json!({ "events": [{ "handle": 7, "num_cached_tokens": 16 }] }),
        );
        peer.send(OUTPUT, ends(&[7, u32::MAX]));
        peer.send(OUTPUT, tokens(&[7], &[1], None)); // of nobody any more
    });
    let first = engine.submit(&[1, 258], json!({})).unwrap();
    let second = engine
        .submit(&[1], json!({ "sampling": { "top_k": 4 } }))
        .unwrap();
    assert_eq!(engine.next(&first), told(7, &[4, 5]));
    assert_eq!(engine.next(&first), told(7, &[-1]));
    let cached = News {
        handle: 7,
        num_cached_tokens: Some(16),
        ..News::default()
    };
    assert_eq!(engine.next(&first), Ok(Some(cached)));
    assert_eq!(engine.next(&first), ended(7));
    assert_eq!(engine.next(&first), Ok(None));
    assert_eq!(engine.next(&second), told(u32::MAX, &[1, 2]));
    assert_eq!(engine.next(&second), ended(u32::MAX));
    assert_eq!(engine.next(&second), Ok(None));
    peer.join().unwrap();
}

fn logprobs(handles: &[u32], counts: &[u32]) -> Raw {
    let half = (-0.5f32).to_bits();
    map([
        ("handles", bin(handles)),
        ("ranks", bin(&[1, 9])),
        ("counts", bin(counts)),
        ("token_ids", bin(&[4, 4, 5])),
        ("logprobs", bin(&[half, half, f32::NEG_INFINITY.to_bits()])),
        ("new_in_9", Raw::Scalar(json!(1))),
    ])
}

fn entries() -> [TokenLogprobs; 2] {
    let likely = vec![(4, -0.5), (4, -0.5)];
    let unlikely = vec![(5, f32::NEG_INFINITY)];
    [(1, likely), (9, unlikely)].map(|(rank, candidates)| TokenLogprobs { rank, candidates })
}

#[test]
fn samples_of_one_request_are_told_apart_and_end_one_by_one() {
    let (mut engine, peer) = session(|peer| {
        assert_eq!(peer.accept(7)["sampling"], json!({ "n": 2 }));
        peer.send(OUTPUT, tokens(&[8, 7], &[1, 2], None));
        peer.send(OUTPUT, ends(&[8]));
        let abort = peer.expect(0x14);
        assert_eq!(
            (&abort["request_ids"], &abort["handles"]),
            (&json!([]), &json!([7, 0, 0, 0]))
        );
        peer.send(OUTPUT, ends(&[7]));
    });
    let sampling = json!({ "sampling": { "n": 2 } });
    let request = engine.submit(&[1], sampling).unwrap();
    let of = |told: Result<Option<News>, Error>, index| {
        Ok(Some(News {
            index,
            ..told?.unwrap()
        }))
    };
    assert_eq!(engine.next(&request), of(told(8, &[1]), 1));
    assert_eq!(engine.next(&request), told(7, &[2]));
    assert_eq!(engine.next(&request), of(ended(8), 1));
    engine.abort_sample(&request, 1).unwrap(); // it has ended
    engine.abort_sample(&request, 0).unwrap();
    assert_eq!(engine.next(&request), ended(7));
    assert_eq!(engine.next(&request), Ok(None));
    peer.join().unwrap();
}

#[test]
fn log_probabilities_are_told_with_their_tokens() {
    let (mut engine, peer) = session(|peer| {
        peer.accept(7);
        let columns = logprobs(&[7, 7], &[2, 1]);
        peer.send(OUTPUT, map([("prompt_logprobs", columns)]));
        let (handles, counts) = (bin(&[7]), bin(&[2]));
        let columns = logprobs(&[7, 7], &[2, 1]);
        let fields = [
            ("handles", handles),
            ("tokens", bin(&[4, 5])),
            ("counts", counts),
        ];
        let [one, two, three] = fields;
        peer.send(OUTPUT, map([one, two, three, ("logprobs", columns)]));
        peer.send(OUTPUT, map([("logprobs", logprobs(&[7, 7], &[3, 1]))]));
    });
    let request = engine.submit(&[1], json!({})).unwrap();
    let prompt = engine.next(&request).unwrap().unwrap();
    assert_eq!(
        (&prompt.prompt_logprobs[..], prompt.token_ids),
        (&entries()[..], vec![])
    );
    let news = engine.next(&request).unwrap().unwrap();
    assert_eq!(
        (&news.logprobs[..], news.token_ids),
        (&entries()[..], vec![4, 5])
    );
    assert_eq!(engine.next(&request).unwrap_err().code, "malformed");
    peer.join().unwrap();
}

#[test]
fn an_older_engine_is_not_sent_parameters_that_it_does_not_know() {
    let wanted = json!({ "json_object": true });
    for (minor, parameter, value, message) in [
        (4, "logprobs", json!(0), "logprobs needs protocol 1.5"),
        (
            5,
            "structured_outputs",
            wanted,
            "structured_outputs needs protocol 1.6",
        ),
    ] {
        let mut old = welcome();
        old["protocol"] = json!([1, minor]);
        let script = |peer: &mut Peer| drop(peer.expect(0x41));
        let (mut engine, peer) = session_at("ipc://*", router(), None, old, script);
        let mut sampling = json!({ "top_k": 1 });
        sampling[parameter] = value;
        let error = engine
            .submit(&[1], json!({ "sampling": sampling }))
            .unwrap_err();
        assert_eq!((&*error.code, &*error.message), ("refused", message));
        drop(engine);
        peer.join().unwrap();
    }
}

#[test]
fn a_schemas_answer_may_be_overtaken_and_its_refusal_is_its_own() {
    let (mut engine, peer) = session(|peer| {
        let (bad, good) = (peer.expect(0x10), peer.expect(0x10));
        let wanted = json!({ "json": "{\"type\": \"integr\"}" });
        assert_eq!(bad["sampling"]["structured_outputs"], wanted);
        let id = &good["request_id"];
        peer.send(0x11, json!({ "request_id": id, "handle": 7, "seed": 0 }));
        peer.send(OUTPUT, tokens(&[7], &[1], None));
        let id = &bad["request_id"];
        let refusal = json!({ "code": "invalid_request", "message": "at /type", "request_id": id });
        peer.send(ERROR, refusal);
        peer.send(OUTPUT, ends(&[7]));
    });
    let wanted = json!({ "json": json!({ "type": "integr" }).to_string().replace(':', ": ") });
    let bad = json!({ "sampling": { "structured_outputs": wanted } });
    let bad = engine.submit(&[1], bad).unwrap();
    let good = engine.submit(&[1], json!({})).unwrap();
    let refusal = engine.next(&bad).unwrap_err();
    assert_eq!(&*refusal.message, "at /type");
    assert_eq!(engine.next(&good), told(7, &[1]));
    assert_eq!(engine.next(&good), ended(7));
    peer.join().unwrap();
}

#[test]
fn columns_that_do_not_fit_together_end_the_session() {
    let (mut engine, peer) = session(|peer| {
        peer.accept(7);
        peer.send(OUTPUT, tokens(&[7, 8], &[1], Some(&[1, u32::MAX])));
    });
    let request = engine.submit(&[1], json!({})).unwrap();
    assert_eq!(engine.next(&request).unwrap_err().code, "malformed");
    assert_eq!(
        engine.submit(&[1], json!({})).unwrap_err().code,
        "malformed"
    );
    peer.join().unwrap();
}

#[test]
fn fields_that_are_no_object_are_refused_before_they_are_sent() {
    let (mut engine, peer) = session(|peer| drop(peer.expect(0x41)));
    assert_eq!(engine.submit(&[1], json!([1])).unwrap_err().code, "refused");
    drop(engine);
    peer.join().unwrap();
}

#[test]
fn an_error_of_one_request_is_told_once_and_leaves_the_others_alone() {
    let (mut engine, peer) = session(|peer| {
        let request_id = &peer.expect(0x10)["request_id"];
        peer.accept(2);
        let code = "overloaded";
        peer.send(
            ERROR,
            json!({ "code": code, "message": "why", "request_id": request_id, "retry_after_s": 2 }),
        );
        peer.send(OUTPUT, ends(&[2]));
    });
    let refused = engine.submit(&[1], json!({})).unwrap();
    let served = engine.submit(&[1], json!({})).unwrap();
    let error = engine.next(&refused).unwrap_err();
    assert_eq!(error.to_string(), "ERROR overloaded: why");
    assert_eq!(
        (&*error.code, error.retry_after_s),
        ("overloaded", Some(2.0))
    );
    assert_eq!(engine.next(&refused), Ok(None));
    assert_eq!(engine.next(&served), ended(2));
    peer.join().unwrap();
}

#[test]
fn an_engine_that_is_full_says_when_to_try_again() {
    let router = router();
    router.bind("ipc://*").expect("a place for a socket");
    let endpoint = router
        .get_last_endpoint()
        .expect("an endpoint")
        .expect("text");
    let peer = thread::spawn(move || {
        let mut peer = Peer {
            router,
            client: Vec::new(),
        };
        peer.expect(0x01);
        let full = json!({ "message": "64 clients", "supported": [[1, 6]], "retry_after_s": 2 });
        peer.send(REFUSED, full);
    });
    let error = Engine::connect(&endpoint, 10_000, None)
        .err()
        .expect("no session");
    assert_eq!((&*error.code, &*error.message), ("refused", "64 clients"));
    assert_eq!(error.retry_after_s, Some(2.0));
    peer.join().unwrap();
}

#[test]
fn an_error_of_no_request_ends_the_session() {
    let (mut engine, peer) = session(|peer| {
        peer.accept(1);
        peer.send(
            ERROR,
            json!({ "code": "engine_dead", "message": "why", "request_id": "1" }),
        );
    });
    let request = engine.submit(&[1], json!({})).unwrap();
    assert_eq!(engine.next(&request).unwrap_err().code, "engine_dead");
    assert_eq!(engine.next(&request).unwrap_err().code, "engine_dead");
    peer.join().unwrap();
}

#[test]
fn an_aborted_request_is_forgotten_and_its_late_outputs_are_ignored() {
    let (mut engine, peer) = session(|peer| {
        let submit = peer.accept(1);
        assert_eq!(
            peer.expect(0x14)["request_ids"],
            json!([submit["request_id"]])
        );
        peer.send(OUTPUT, tokens(&[1], &[5], None));
        peer.send(0x41, json!({ "reason": "done" }));
    });
    let request = engine.submit(&[1], json!({})).unwrap();
    engine.abort(&request).unwrap();
    assert_eq!(engine.next(&request), Ok(None));
    assert_eq!(control(&mut engine, "stats").unwrap_err().code, "bye");
    peer.join().unwrap();
}

#[test]
fn a_ping_is_answered_whoever_waits() {
    let (mut engine, peer) = session(|peer| {
        peer.send(0x20, json!({ "nonce": 77 }));
        let call_id = &peer.expect(0x30)["call_id"];
        assert_eq!(peer.expect(0x21), json!({ "nonce": 77 }));
        peer.send(
            REPLY,
            json!({ "call_id": call_id, "ok": false, "message": "no" }),
        );
    });
    let refused = control(&mut engine, "resume").unwrap_err();
    assert_eq!((&*refused.code, &*refused.message), ("refused", "no"));
    peer.join().unwrap();
}

#[test]
fn a_chunk_of_a_file_is_the_data_of_its_reply() {
    let (mut engine, peer) = session(|peer| {
        let call_id = Raw::Scalar(peer.expect(0x30)["call_id"].clone());
        peer.send(
            REPLY,
            map([("call_id", call_id), ("data", Raw::Bin(b"abc".to_vec()))]),
        );
    });
    let chunk = engine.control(json!({ "operation": "read_file", "file": "tokenizer.json" }));
    assert_eq!(chunk, Ok((Value::Null, b"abc".to_vec())));
    peer.join().unwrap();
}

#[test]
fn tcp_without_keys_is_refused() {
    let error = Engine::connect("tcp://127.0.0.1:9", 1, None).err().unwrap();
    assert_eq!(error.code, "refused");
}

#[test]
fn dropping_the_engine_says_bye() {
    let (engine, peer) = session(|peer| drop(peer.expect(0x41)));
    drop(engine);
    peer.join().unwrap();
}

#[test]
fn keys_open_a_session_with_an_engine_that_has_curve() {
    if zmq::has("curve") != Some(true) {
        return eprintln!("this libzmq has no CURVE: nothing was tested");
    }
    let (engines, own) = (
        zmq::CurveKeyPair::new().unwrap(),
        zmq::CurveKeyPair::new().unwrap(),
    );
    let router = router();
    router.set_curve_server(true).unwrap();
    router.set_curve_secretkey(&engines.secret_key).unwrap();
    let keys = [engines.public_key, own.public_key, own.secret_key];
    let keys = keys.map(|key| zmq::z85_encode(&key).unwrap());
    let [server, public, secret] = &keys;
    let script = |peer: &mut Peer| drop(peer.expect(0x41));
    let keys = Some([&**server, public, secret]);
    let (engine, peer) = session_at("tcp://127.0.0.1:*", router, keys, welcome(), script);
    assert_eq!(engine.welcome, welcome());
    drop(engine);
    peer.join().unwrap();
}

#[test]
fn silence_ends_it() {
    let nobody = std::env::temp_dir().join(format!("nanocore-nobody-{}", std::process::id()));
    let error = Engine::connect(&format!("ipc://{}", nobody.display()), 1, None)
        .err()
        .unwrap();
    assert_eq!(error.code, "silence");
}

/// A script's start: a stream with one token, whose engine then stops.
fn stop_in_the_middle(peer: &mut Peer) {
    peer.accept(7);
    peer.send(OUTPUT, tokens(&[7], &[5], None));
    peer.send(0x40, json!({ "deadline_ms": 0 }));
    let stops = json!({ "handle": 7, "finish_reason": "abort", "message": "SIGTERM" });
    peer.send(OUTPUT, json!({ "events": [stops] }));
    peer.send(0x41, json!({}));
}

fn of_1_9() -> Value {
    let mut welcome = welcome();
    welcome["protocol"] = json!([1, 9]);
    welcome
}

#[test]
fn a_stream_goes_on_behind_its_tokens_in_the_next_session() {
    let (engine, peer) = session_at("ipc://*", router(), None, of_1_9(), |peer| {
        stop_in_the_middle(peer);
        peer.expect(0x01);
        peer.send(WELCOME, of_1_9());
        let submit = peer.accept(9);
        assert_eq!(submit["request_id"], json!("1.0"));
        assert_eq!(submit["output_token_ids"], json!([5, 0, 0, 0]));
        assert_eq!(submit["sampling"]["seed"], json!(0)); // as accepted
        assert_eq!(submit["sampling"]["max_tokens"], json!(3));
        peer.send(OUTPUT, tokens(&[9], &[6], None));
        let end = json!({ "handle": 9, "finish_reason": "timeout" });
        peer.send(OUTPUT, json!({ "events": [end] }));
        peer.expect(0x41);
    });
    let mut engine = engine.resuming(60).expect("a session");
    let fields = json!({ "sampling": { "max_tokens": 3 } });
    let request = engine.submit(&[1], fields).expect("a request");
    let mut seen = Vec::new();
    while let Some(news) = engine.next(&request).expect("news") {
        seen.push((news.token_ids, news.finish_reason));
    }
    let end = (vec![], Some("timeout".to_string()));
    assert_eq!(seen, [(vec![5], None), (vec![6], None), end]);
    drop(engine);
    peer.join().expect("all as expected");
}

#[test]
fn what_an_engine_that_drains_refuses_is_submitted_to_the_next_one() {
    let (engine, peer) = session_at("ipc://*", router(), None, of_1_9(), |peer| {
        let submit = peer.expect(0x10);
        let request_id = &submit["request_id"];
        let why = json!({ "code": "draining", "message": "", "request_id": request_id });
        peer.send(ERROR, why);
        peer.send(0x41, json!({}));
        peer.expect(0x01);
        peer.send(WELCOME, of_1_9());
        assert_eq!(peer.accept(9), submit);
        peer.send(OUTPUT, ends(&[9]));
    });
    let mut engine = engine.resuming(60).expect("a session");
    let request = engine.submit(&[1], json!({})).expect("a request");
    let news = engine.next(&request).expect("news").expect("an end");
    assert!(news.finish_reason.is_some());
    peer.join().expect("all as expected");
}

#[test]
fn a_stream_that_gets_nothing_from_three_engines_in_a_row_fails() {
    let (engine, peer) = session_at("ipc://*", router(), None, of_1_9(), |peer| {
        stop_in_the_middle(peer);
        for handle in [8, 9] {
            peer.expect(0x01);
            peer.send(WELCOME, of_1_9());
            peer.accept(handle);
            peer.send(0x41, json!({}));
        }
        peer.expect(0x01);
        peer.send(WELCOME, of_1_9());
    });
    let mut engine = engine.resuming(60).expect("a session");
    let request = engine.submit(&[1], json!({})).expect("a request");
    engine.next(&request).expect("news");
    let error = engine.next(&request).expect_err("it is lost");
    assert_eq!(error.code, "engine_dead");
    peer.join().expect("all as expected");
}

#[test]
fn a_stream_that_an_engine_before_1_9_cannot_go_on_with_fails() {
    let (engine, peer) = session_at("ipc://*", router(), None, of_1_9(), |peer| {
        stop_in_the_middle(peer);
        peer.expect(0x01);
        peer.send(WELCOME, welcome());
    });
    let mut engine = engine.resuming(60).expect("a session");
    let request = engine.submit(&[1], json!({})).expect("a request");
    engine.next(&request).expect("news");
    let error = engine.next(&request).expect_err("it is lost");
    assert_eq!(error.message, "output_token_ids needs protocol 1.9");
    peer.join().expect("all as expected");
}
