//! A client of the nanocore inference engine: token ids in, token ids out. See README.md.

pub mod wire;
use serde::Deserialize;
pub use serde_json::{json, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};
use wire::Raw;

pub type Result<T> = std::result::Result<T, Error>;

/// With a `request_id`, or `refused` by a control, it leaves the session open.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, thiserror::Error)]
#[error("ERROR {code}: {message}")]
pub struct Error {
    /// The engine's, or one of the client's own: refused, malformed, bye, silence, zmq.
    pub code: String,
    pub message: String,
    pub request_id: Option<String>,
    pub retry_after_s: Option<f64>,
}

fn error(code: &str, message: impl ToString) -> Error {
    Error { code: code.into(), message: message.to_string(), ..Error::default() }
}

impl From<zmq::Error> for Error {
    fn from(cause: zmq::Error) -> Error {
        error(if cause == zmq::Error::EAGAIN { "silence" } else { "zmq" }, cause)
    }
}

/// New tokens of a request, or how many were cached, or its end, which has a `finish_reason`.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct News {
    pub token_ids: Vec<i32>,
    pub num_cached_tokens: Option<u64>,
    pub finish_reason: Option<String>,
    pub stop_reason: Option<i64>,
    pub message: Option<String>,
}

/// An open session, for one thread at a time: whoever waits for something takes in all that comes.
/// Dropping it ends the session and aborts its requests.
pub struct Engine {
    /// What the engine said of itself, for instance `welcome["model"]["max_model_len"]`.
    pub welcome: Value,
    socket: zmq::Socket,
    streams: HashMap<u64, VecDeque<Result<News>>>, // by request, until read to the end
    handles: HashMap<u64, u64>,                    // to requests
    num_ids: u64,
    reply: Value,
    over: Result<()>,
}

impl Engine {
    /// An engine that is silent for `timeout_ms`, usually 10000, is given up. `keys` are for tcp://,
    /// as Z85 text: the engine's public one, the client's public one and the client's secret one.
    pub fn connect(endpoint: &str, timeout_ms: i32, keys: Option<[&str; 3]>) -> Result<Engine> {
        let socket = zmq::Context::new().socket(zmq::DEALER)?; // its high-water marks are 1000
        socket.set_rcvtimeo(timeout_ms)?;
        socket.set_sndtimeo(timeout_ms)?;
        socket.set_linger(200)?; // for the BYE
        socket.set_maxmsgsize(16 << 20)?;
        if let Some([server, public, secret]) = keys {
            socket.set_curve_serverkey(server.as_bytes())?;
            socket.set_curve_publickey(public.as_bytes())?;
            socket.set_curve_secretkey(secret.as_bytes())?;
        }
        socket.connect(endpoint)?;
        let (welcome, streams, handles, num_ids, reply) = Default::default();
        let over = Ok(());
        let mut engine = Engine { welcome, socket, streams, handles, num_ids, reply, over };
        engine.send(0x01, json!({ "protocol": [1, 3], "client": "nanocore-rust" }))?;
        while engine.welcome.is_null() {
            engine.poll(true)?;
        }
        Ok(engine)
    }

    /// Starts a request and numbers it. `fields`: an object with `sampling` and others of SUBMIT.
    pub fn submit(&mut self, prompt: &[i32], fields: Value) -> Result<u64> {
        let mut body: BTreeMap<String, Raw> = typed(&fields)?;
        let prompt: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.num_ids += 1;
        body.insert("request_id".into(), Raw::Scalar(self.num_ids.to_string().into()));
        body.insert("prompt_token_ids".into(), Raw::Bin(prompt));
        self.send(0x10, body)?;
        self.streams.insert(self.num_ids, VecDeque::new());
        Ok(self.num_ids)
    }

    /// Waits for news of a request. None: all of it was told, or it was aborted.
    pub fn next(&mut self, request: u64) -> Result<Option<News>> {
        while let Some(stream) = self.streams.get_mut(&request) {
            if let Some(told) = stream.pop_front() {
                if !matches!(told, Ok(News { finish_reason: None, .. })) {
                    self.streams.remove(&request);
                }
                return told.map(Some);
            }
            self.poll(true)?;
        }
        Ok(None)
    }

    /// Ends a request, and forgets what was not read of it.
    pub fn abort(&mut self, request: u64) -> Result<()> {
        self.streams.remove(&request);
        self.send(0x14, json!({ "request_ids": [request.to_string()] }))
    }

    /// Does a CONTROL, for instance `json!({"operation": "stats"})`, and returns its REPLY.
    pub fn control(&mut self, fields: Value) -> Result<Value> {
        let mut body: BTreeMap<String, Value> = typed(&fields)?;
        self.num_ids += 1;
        body.insert("call_id".into(), self.num_ids.into());
        self.send(0x30, body)?;
        while self.reply["call_id"] != self.num_ids {
            self.poll(true)?;
        }
        match self.reply["ok"] == false {
            true => Err(error("refused", text(&self.reply["message"]))),
            false => Ok(self.reply.take()),
        }
    }

    /// A file of the model card, of at most 64 MiB. Its digest is not checked.
    pub fn read_file(&mut self, name: &str) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        while content.len() <= 64 << 20 {
            let (operation, offset) = ("read_file", content.len());
            let control = json!({ "operation": operation, "file": name, "offset": offset });
            content.append(&mut typed(&self.control(control)?["data"])?);
            if content.len() == offset {
                return Ok(content);
            }
        }
        Err(error("refused", "the file has more than 64 MiB"))
    }

    /// Takes in one message, if need be after waiting for it; false if none came.
    pub fn poll(&mut self, wait: bool) -> Result<bool> {
        self.over.clone()?;
        self.over = match self.socket.recv_multipart(if wait { 0 } else { zmq::DONTWAIT }) {
            Err(zmq::Error::EINTR) => return Ok(false),
            Err(zmq::Error::EAGAIN) if !wait => return Ok(false),
            received => received.map_err(Error::from).and_then(|frames| self.take(&frames)),
        };
        self.over.clone().map(|()| true)
    }

    fn send(&self, op: u8, body: impl serde::Serialize) -> Result<()> {
        self.over.clone()?;
        let body = rmp_serde::to_vec(&body).expect("memory takes every message");
        Ok(self.socket.send_multipart([vec![op], body], 0)?)
    }

    fn take(&mut self, frames: &[Vec<u8>]) -> Result<()> {
        let malformed = || error("malformed", format!("{} frames", frames.len()));
        let (op, body) = wire::decode(frames).ok_or_else(malformed)?;
        match op {
            0x02 => self.welcome = body,
            0x03 => return Err(error("refused", text(&body["message"]))),
            0x11 => drop(self.handles.insert(number(&body["handle"]), number(&body["request_id"]))),
            0x12 => return self.deliver(&body),
            0x13 => match typed::<Error>(&body)? {
                error if error.request_id.is_some() && error.code != "engine_dead" => {
                    self.push(number(&body["request_id"]), Err(error))
                }
                error => return Err(error),
            },
            0x20 => return self.send(0x21, body),
            0x31 => self.reply = body,
            0x41 => return Err(error("bye", text(&body["reason"]))),
            _ => {} // PONG
        }
        Ok(())
    }

    fn deliver(&mut self, output: &Value) -> Result<()> {
        let column = |name: &str| -> Option<Vec<u32>> {
            let bytes: Vec<u8> = typed(&output[name]).ok()?; // none if it is nil
            Some(bytes.chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let [handles, tokens] = ["handles", "tokens"].map(|name| column(name).unwrap_or_default());
        let counts = column("counts").unwrap_or_else(|| vec![1; handles.len()]);
        let num_tokens: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if (counts.len(), num_tokens) != (handles.len(), tokens.len() as u64) {
            return Err(error("malformed", "the columns of an OUTPUT do not fit together"));
        }
        let mut tokens = tokens.into_iter().map(|token| token as i32);
        for (handle, count) in handles.into_iter().zip(counts) {
            let token_ids = tokens.by_ref().take(count as usize).collect();
            self.tell(handle.into(), News { token_ids, ..News::default() });
        }
        for event in output["events"].as_array().into_iter().flatten() {
            self.tell(number(&event["handle"]), typed(event)?);
        }
        Ok(())
    }

    fn tell(&mut self, handle: u64, news: News) {
        let request = match news.finish_reason {
            None => self.handles.get(&handle).copied(),
            Some(_) => self.handles.remove(&handle),
        };
        self.push(request.unwrap_or_default(), Ok(news));
    }

    fn push(&mut self, request: u64, news: Result<News>) {
        if let Some(stream) = self.streams.get_mut(&request) {
            stream.push_back(news);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Without room for it, the engine finds out by itself.
        let _ = self.socket.send_multipart([vec![0x41], vec![0x80]], zmq::DONTWAIT);
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A handle, or the number in a request_id; 0 is none that a request has.
fn number(value: &Value) -> u64 {
    value.as_u64().or_else(|| text(value).parse().ok()).unwrap_or_default()
}

fn typed<'a, T: Deserialize<'a>>(value: &'a Value) -> Result<T> {
    T::deserialize(value).map_err(|cause| error("malformed", cause))
}
