//! Sessions with an engine that is a script: a ROUTER that answers as each test tells it.

use nanocore_client::wire::*;
use nanocore_client::{Engine, Error, News, Options};
use std::thread::{self, JoinHandle};
use std::time::Duration;

type Frames = Vec<Vec<u8>>;

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
    fn expect<T: serde::de::DeserializeOwned>(&mut self, op: u8) -> T {
        let frames = self.receive();
        assert_eq!(frames[0], [op]);
        decode(&frames[1]).expect("a body")
    }

    fn send(&self, op: u8, body: &impl serde::Serialize) {
        let frames = [self.client.clone(), vec![op], encode(body)];
        self.router.send_multipart(frames, 0).expect("room for a message");
    }

    /// Waits for a SUBMIT, and accepts it under this handle.
    fn accept(&mut self, handle: u32) -> Submit {
        let submit: Submit = self.expect(Submit::OP);
        let request_id = submit.request_id.clone();
        self.send(Accepted::OP, &Accepted { request_id, handle, seed: 0 });
        submit
    }
}

fn text(text: &str) -> Text {
    Text(text.into())
}

fn welcome() -> Welcome {
    let model = ModelCard {
        model: text("tiny"),
        architecture: text("Tiny"),
        dtype: text("float32"),
        vocab_size: 4,
        max_model_len: 8,
        eos_token_ids: vec![3],
        block_size: 16,
        num_blocks: 2,
        default_sampling: Sampling::default(),
        files: vec![],
    };
    let limits = Limits {
        max_frame_bytes: 1 << 24,
        max_num_seqs: 8,
        max_request_id_chars: 256,
        max_cache_salt_chars: 1024,
        ping_interval_ms: 1000,
        session_timeout_ms: 30000,
        max_num_queued_reqs: None,
        max_num_queued_tokens: None,
        max_file_chunk_bytes: 65536,
    };
    let (session, engine_instance) = (text("s"), text("i"));
    Welcome { protocol: [1, 3], session, engine_instance, model, limits, capabilities: vec![] }
}

/// A session, of a client with these options, with an engine that does what `script` says after its
/// WELCOME and listens at `endpoint`.
fn session_at(
    endpoint: &str,
    router: zmq::Socket,
    options: &Options,
    script: impl FnOnce(&mut Peer) + Send + 'static,
) -> (Engine, JoinHandle<()>) {
    router.bind(endpoint).expect("a place for a socket");
    let endpoint = router.get_last_endpoint().expect("an endpoint").expect("text");
    let peer = thread::spawn(move || {
        let mut peer = Peer { router, client: Vec::new() };
        let hello: Hello = peer.expect(Hello::OP);
        assert_eq!(hello.protocol, [1, 3]);
        peer.send(Welcome::OP, &welcome());
        script(&mut peer);
    });
    (Engine::connect(&endpoint, options).expect("a session"), peer)
}

fn router() -> zmq::Socket {
    zmq::Context::new().socket(zmq::ROUTER).expect("a socket")
}

fn session(script: impl FnOnce(&mut Peer) + Send + 'static) -> (Engine, JoinHandle<()>) {
    session_at("ipc://*", router(), &Options::default(), script)
}

fn bytes(values: &[u32]) -> Bin {
    Bin(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn tokens(handles: &[u32], tokens: &[u32], counts: Option<&[u32]>) -> Output {
    let (handles, tokens) = (bytes(handles), bytes(tokens));
    Output { handles, tokens, counts: counts.map(bytes), events: vec![] }
}

fn end(handle: u32) -> Event {
    let finish_reason = Some(FinishReason("length".into()));
    Event { handle, num_cached_tokens: None, finish_reason, stop_reason: None, message: None }
}

fn failure(code: &str, request_id: Option<Text>) -> Failure {
    Failure { code: text(code), message: text("why"), request_id, retry_after_s: Some(2.5) }
}

#[test]
fn outputs_reach_the_requests_they_are_for() {
    let (mut engine, peer) = session(|peer| {
        assert_eq!(peer.accept(7).prompt_token_ids, Bin(vec![1, 0, 0, 0, 2, 1, 0, 0]));
        peer.accept(u32::MAX);
        peer.send(Output::OP, &tokens(&[u32::MAX, 9, 7], &[1, 2, 3, 4, 5], Some(&[2, 1, 2])));
        peer.send(Output::OP, &tokens(&[7], &[u32::MAX], None));
        peer.send(
            Output::OP,
            &Output { events: vec![end(7), end(u32::MAX)], ..tokens(&[], &[], None) },
        );
    });
    let first = engine.submit(&[1, 258], Submit::default()).unwrap();
    let second = engine.submit(&[1], Submit::default()).unwrap();
    assert_eq!(engine.next(&first), Ok(Some(News::Tokens(vec![4, 5]))));
    assert_eq!(engine.next(&first), Ok(Some(News::Tokens(vec![-1]))));
    assert_eq!(engine.next(&first), Ok(Some(News::Event(end(7)))));
    assert_eq!(engine.next(&first), Ok(None));
    assert_eq!(engine.next(&second), Ok(Some(News::Tokens(vec![1, 2]))));
    assert_eq!(engine.next(&second), Ok(Some(News::Event(end(u32::MAX)))));
    assert_eq!(engine.next(&second), Ok(None));
    peer.join().unwrap();
}

#[test]
fn columns_that_do_not_fit_together_end_the_session() {
    let (mut engine, peer) = session(|peer| {
        peer.accept(7);
        peer.send(Output::OP, &tokens(&[7, 8], &[1], Some(&[1, u32::MAX])));
    });
    let request = engine.submit(&[1], Submit::default()).unwrap();
    assert!(matches!(engine.next(&request), Err(Error::Protocol(_))));
    assert!(matches!(engine.submit(&[1], Submit::default()), Err(Error::Protocol(_))));
    peer.join().unwrap();
}

#[test]
fn an_error_of_one_request_is_told_once_and_leaves_the_others_alone() {
    let (mut engine, peer) = session(|peer| {
        let refused: Submit = peer.expect(Submit::OP);
        peer.accept(2);
        peer.send(Failure::OP, &failure("overloaded", Some(refused.request_id)));
        peer.send(Output::OP, &Output { events: vec![end(2)], ..tokens(&[], &[], None) });
    });
    let refused = engine.submit(&[1], Submit::default()).unwrap();
    let served = engine.submit(&[1], Submit::default()).unwrap();
    let error = Error::Engine(failure("overloaded", Some(Text(refused.clone()))));
    assert_eq!(error.to_string(), "ERROR overloaded: why");
    assert_eq!(engine.next(&refused), Err(error));
    assert_eq!(engine.next(&refused), Ok(None));
    assert_eq!(engine.next(&served), Ok(Some(News::Event(end(2)))));
    peer.join().unwrap();
}

#[test]
fn an_aborted_request_is_forgotten_and_its_late_outputs_are_ignored() {
    let (mut engine, peer) = session(|peer| {
        let submit = peer.accept(1);
        let abort: Abort = peer.expect(Abort::OP);
        assert_eq!(abort.request_ids, [submit.request_id]);
        peer.send(Output::OP, &tokens(&[1], &[5], None));
        peer.send(Bye::OP, &Bye { reason: text("done") });
    });
    let request = engine.submit(&[1], Submit::default()).unwrap();
    engine.abort(&request).unwrap();
    assert_eq!(engine.next(&request), Ok(None));
    let dead = engine.control("stats", None, 0);
    assert_eq!(dead, Err(Error::Dead("BYE done".into())));
    peer.join().unwrap();
}

#[test]
fn a_ping_is_answered_whoever_waits() {
    let (mut engine, peer) = session(|peer| {
        peer.send(Ping::OP, &Ping { nonce: Int(77) });
        let control: Control = peer.expect(Control::OP);
        assert_eq!(peer.expect::<Pong>(Pong::OP), Pong { nonce: Int(77), num_steps: None });
        let (call_id, message) = (control.call_id, Some(text("no")));
        peer.send(Reply::OP, &Reply { call_id, ok: false, message, stats: None, data: None });
    });
    assert_eq!(engine.control("resume", None, 0), Err(Error::Refused("no".into())));
    peer.join().unwrap();
}

#[test]
fn a_file_is_read_chunk_by_chunk() {
    let (mut engine, peer) = session(|peer| {
        for chunk in [&b"abc"[..], b"de", b""] {
            let control: Control = peer.expect(Control::OP);
            assert_eq!(control.file, Some(text("tokenizer.json")));
            let rest = &b"abcde"[control.offset.0 as usize..];
            assert!(rest.starts_with(chunk));
            let (call_id, data) = (control.call_id, Some(Bin(chunk.into())));
            peer.send(Reply::OP, &Reply { call_id, ok: true, message: None, stats: None, data });
        }
    });
    assert_eq!(engine.read_file("tokenizer.json"), Ok(b"abcde".to_vec()));
    peer.join().unwrap();
}

#[test]
fn dropping_the_engine_says_bye() {
    let (engine, peer) = session(|peer| drop(peer.expect::<Bye>(Bye::OP)));
    drop(engine);
    peer.join().unwrap();
}

#[test]
fn keys_open_a_session_with_an_engine_that_has_curve() {
    if zmq::has("curve") != Some(true) {
        return eprintln!("this libzmq has no CURVE: nothing was tested");
    }
    let (engines, own) = (zmq::CurveKeyPair::new().unwrap(), zmq::CurveKeyPair::new().unwrap());
    let router = router();
    router.set_curve_server(true).unwrap();
    router.set_curve_secretkey(&engines.secret_key).unwrap();
    let keys = [engines.public_key, own.public_key, own.secret_key];
    let keys = Some(keys.map(|key| zmq::z85_encode(&key).unwrap()));
    let options = Options { keys, ..Options::default() };
    let script = |peer: &mut Peer| drop(peer.expect::<Bye>(Bye::OP));
    let (engine, peer) = session_at("tcp://127.0.0.1:*", router, &options, script);
    assert_eq!(engine.welcome(), &welcome());
    drop(engine);
    peer.join().unwrap();
}

#[test]
fn silence_is_death() {
    let timeout = Some(Duration::from_millis(1));
    let nobody = std::env::temp_dir().join(format!("nanocore-nobody-{}", std::process::id()));
    let options = Options { timeout, ..Options::default() };
    let error = Engine::connect(&format!("ipc://{}", nobody.display()), &options).map(|_| ());
    assert!(matches!(error, Err(Error::Dead(_))), "{error:?}");
}
