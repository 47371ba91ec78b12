//! A client of the nanocore inference engine: token ids in, token ids out. See README.md.
use serde::{Deserialize, Serialize};
pub use serde_json::{json, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};
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
    Error {
        code: code.into(),
        message: message.to_string(),
        ..Error::default()
    }
}

impl From<zmq::Error> for Error {
    fn from(cause: zmq::Error) -> Error {
        error(
            if cause == zmq::Error::EAGAIN {
                "silence"
            } else {
                "zmq"
            },
            cause,
        )
    }
}

/// New tokens of a request, or how many were cached, or its end, which has a `finish_reason`.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub struct News {
    #[serde(skip)]
    pub token_ids: Vec<i32>,
    /// Of these tokens, and of some of the prompt's, if the request asks for them.
    #[serde(skip)]
    pub logprobs: Vec<TokenLogprobs>,
    #[serde(skip)]
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Which sample, of a request with `n`.
    #[serde(skip)]
    pub index: u32,
    pub handle: u32,
    pub num_cached_tokens: Option<u64>,
    pub finish_reason: Option<String>,
    pub stop_reason: Option<i64>,
    pub message: Option<String>,
}

/// Of one token: its rank, 1 being the most likely, and (id, log probability) of itself and others.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    pub rank: u32,
    pub candidates: Vec<(i32, f32)>,
}

/// Any MessagePack. As JSON, a `bin` is an array of its bytes.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Raw {
    Map(BTreeMap<String, Raw>),
    Array(Vec<Raw>),
    Scalar(Value),
    Bin(#[serde(with = "serde_bytes")] Vec<u8>),
}

/// The fields of all messages that a client acts on; the others are ignored.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Body<'a> {
    protocol: Option<[u64; 2]>,
    request_id: Option<String>,
    handle: Option<u32>,
    handles: &'a [u8],
    tokens: &'a [u8],
    #[serde(borrow)]
    counts: Option<&'a serde_bytes::Bytes>,
    events: Vec<News>,
    #[serde(borrow)]
    logprobs: Option<Columns<'a>>,
    #[serde(borrow)]
    prompt_logprobs: Option<Columns<'a>>,
    nonce: u64,
    call_id: Option<u64>,
    ok: Option<bool>,
    stats: Value,
    #[serde(borrow)]
    data: Option<&'a serde_bytes::Bytes>,
    #[serde(alias = "reason")]
    message: Option<String>,
    retry_after_s: Option<f64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Columns<'a> {
    handles: &'a [u8],
    ranks: &'a [u8],
    counts: &'a [u8],
    token_ids: &'a [u8],
    logprobs: &'a [u8],
}

/// News and errors that are not read yet, of a request with so many samples that have not ended.
struct Stream {
    unread: VecDeque<Result<News>>,
    num_open: u64,
}

/// The first came with 1.6, the others with 1.5.
const NEW_PARAMETERS: [&str; 11] = [
    "structured_outputs",
    "n",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "bad_words_token_ids",
];

/// An open session, for one thread: whoever waits takes in all that comes. Dropping it says BYE.
pub struct Engine {
    /// What the engine said of itself, for instance `welcome["model"]["max_model_len"]`.
    pub welcome: Value,
    socket: zmq::Socket,
    streams: HashMap<String, Stream>, // by request id, until read to the end
    unanswered: HashMap<String, u32>, // numbers of samples, by request id
    handles: HashMap<u32, (String, u32)>, // to request ids and indices
    replies: HashMap<u64, Result<(Value, Vec<u8>)>>, // by call_id
    num_ids: u64,
    over: Result<()>,
}

impl Engine {
    /// An engine silent for `timeout_ms`, usually 10000, is given up. tcp:// needs `keys`, as Z85
    /// text: the public one of the engine, the public one of the client and its secret one.
    pub fn connect(endpoint: &str, timeout_ms: i32, keys: Option<[&str; 3]>) -> Result<Engine> {
        let socket = zmq::Context::new().socket(zmq::DEALER)?; // its high-water marks are 1000
        socket.set_rcvtimeo(timeout_ms)?;
        socket.set_linger(200)?; // for the BYE
        socket.set_maxmsgsize(16 << 20)?;
        if let Some([server, public, secret]) = keys {
            socket.set_curve_serverkey(server.as_bytes())?;
            socket.set_curve_publickey(public.as_bytes())?;
            socket.set_curve_secretkey(secret.as_bytes())?;
        } else if endpoint.starts_with("tcp://") {
            return Err(error(
                "refused",
                "tcp:// needs keys: anybody could answer there",
            ));
        }
        socket.connect(endpoint)?;
        let (welcome, streams, unanswered, handles, replies, num_ids) = Default::default();
        let mut new = Engine {
            welcome,
            socket,
            streams,
            unanswered,
            handles,
            replies,
            num_ids,
            over: Ok(()),
        };
        new.send(
            0x01,
            json!({ "protocol": [1, 6], "client": "nanocore-rust" }),
        )?;
        while new.welcome.is_null() {
            new.poll(true)?;
        }
        Ok(new)
    }

    /// Starts a request and names it. `fields`: an object with `sampling` and others of SUBMIT.
    /// With `n` in `sampling` there are so many samples; `News::index` says of which one news are.
    pub fn submit(&mut self, prompt: &[i32], fields: Value) -> Result<String> {
        let sampling = &fields["sampling"];
        let num_samples = sampling["n"].as_u64().unwrap_or(1);
        for (i, name) in NEW_PARAMETERS.iter().enumerate() {
            let since = if i == 0 { 6 } else { 5 };
            let is_new = self.welcome["protocol"][1].as_u64() < Some(since);
            if is_new && !sampling[*name].is_null() {
                return Err(error("refused", format!("{name} needs protocol 1.{since}")));
            }
        }
        let object = BTreeMap::<String, Raw>::deserialize(fields);
        let mut body = object.map_err(|cause| error("refused", cause))?;
        self.num_ids += 1;
        let request_id = self.num_ids.to_string();
        body.insert("request_id".into(), Raw::Scalar(json!(request_id)));
        let prompt = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
        body.insert("prompt_token_ids".into(), Raw::Bin(prompt));
        self.send(0x10, body)?;
        let stream = Stream {
            unread: VecDeque::new(),
            num_open: num_samples,
        };
        self.streams.insert(request_id.clone(), stream);
        self.unanswered
            .insert(request_id.clone(), num_samples as u32);
        Ok(request_id)
    }

    /// Waits for news of a request. None: all of it was told, or it was aborted.
    pub fn next(&mut self, request_id: &str) -> Result<Option<News>> {
        while let Some(stream) = self.streams.get_mut(request_id) {
            if let Some(told) = stream.unread.pop_front() {
                stream.num_open -= match &told {
                    Ok(news) => u64::from(news.finish_reason.is_some()),
                    Err(_) => stream.num_open,
                };
                if stream.num_open == 0 {
                    self.streams.remove(request_id); // nothing follows
                }
                return told.map(Some);
            }
            self.poll(true)?;
        }
        Ok(None)
    }

    /// Ends a request, and forgets what was not read of it.
    pub fn abort(&mut self, request_id: &str) -> Result<()> {
        self.streams.remove(request_id);
        self.send(0x14, json!({ "request_ids": [request_id] }))
    }

    /// Ends one sample of a request, the others go on; its last news say "abort".
    pub fn abort_sample(&mut self, request_id: &str, index: u32) -> Result<()> {
        let named = |sample: &(String, u32)| (&*sample.0, sample.1) == (request_id, index);
        let found = self.handles.iter().find(|(_, sample)| named(sample));
        let Some((handle, _)) = found else {
            return Ok(());
        };
        let handles = Raw::Bin(handle.to_le_bytes().into());
        let none = Raw::Array(Vec::new());
        let body = [("request_ids", none), ("handles", handles)];
        self.send(0x14, BTreeMap::from(body))
    }

    /// Does a CONTROL, for instance `json!({"operation": "stats"})`; returns its stats and data.
    pub fn control(&mut self, mut fields: Value) -> Result<(Value, Vec<u8>)> {
        self.num_ids += 1;
        fields["call_id"] = self.num_ids.into();
        self.send(0x30, fields)?;
        while !self.replies.contains_key(&self.num_ids) {
            self.poll(true)?;
        }
        self.replies
            .remove(&self.num_ids)
            .expect("the loop ends with it")
    }

    /// Takes in one message, if need be after waiting for it; false if none came.
    pub fn poll(&mut self, wait: bool) -> Result<bool> {
        self.over.clone()?;
        self.over = match self
            .socket
            .recv_multipart(if wait { 0 } else { zmq::DONTWAIT })
        {
            Err(zmq::Error::EINTR) => return Ok(false), // a signal
            Err(zmq::Error::EAGAIN) if !wait => return Ok(false),
            received => received
                .map_err(Error::from)
                .and_then(|frames| self.take(&frames)),
        };
        self.over.clone().map(|()| true)
    }

    fn send(&self, op: u8, body: impl Serialize) -> Result<()> {
        self.over.clone()?;
        let body = rmp_serde::to_vec(&body).map_err(|cause| error("refused", cause))?;
        Ok(self
            .socket
            .send_multipart([vec![op], body], zmq::DONTWAIT)?)
    }

    fn take(&mut self, frames: &[Vec<u8>]) -> Result<()> {
        let is_map = |body: &[u8]| matches!(body.first(), Some(0x80..=0x8f | 0xde | 0xdf));
        let (op, bytes) = match frames {
            [op, body] if op.len() == 1 && is_map(body) => (op[0], &body[..]),
            _ => {
                return Err(error(
                    "malformed",
                    "not an op byte and a map, in two frames",
                ))
            }
        };
        let body: Body = read(bytes)?;
        let missing = || {
            error(
                "malformed",
                format!("op 0x{op:02x} without a field that it needs"),
            )
        };
        let refused = error("refused", body.message.clone().unwrap_or_default());
        match op {
            0x02 if matches!(body.protocol, Some([1, _])) => {
                self.welcome = json!(read::<Raw>(bytes)?)
            }
            0x03 => {
                return Err(Error {
                    retry_after_s: body.retry_after_s,
                    ..refused
                })
            }
            0x11 => {
                let (handle, id) = body.handle.zip(body.request_id).ok_or_else(missing)?;
                let num_samples = self.unanswered.remove(&id).unwrap_or(1);
                let sample = |i| (handle.wrapping_add(i), (id.clone(), i));
                self.handles.extend((0..num_samples).map(sample));
            }
            0x12 => return self.deliver(body),
            0x13 => match read::<Error>(bytes)? {
                why if why.request_id.is_none() || why.code == "engine_dead" => return Err(why),
                why => self.push(&body.request_id.unwrap_or_default(), Err(why)),
            },
            0x20 => return self.send(0x21, json!({ "nonce": body.nonce })),
            0x21 => {} // PONG
            0x31 => {
                let data = body.data.map_or_else(Vec::new, |data| data.to_vec());
                let done = body
                    .ok
                    .unwrap_or(true)
                    .then_some((body.stats, data))
                    .ok_or(refused);
                self.replies.insert(body.call_id.ok_or_else(missing)?, done);
            }
            0x41 => {
                return Err(Error {
                    code: "bye".into(),
                    ..refused
                })
            }
            _ => {
                return Err(error(
                    "malformed",
                    "an op, or its version, that is unknown here",
                ))
            }
        }
        Ok(())
    }

    fn deliver(&mut self, output: Body) -> Result<()> {
        let (handles, tokens) = (column(output.handles)?, column(output.tokens)?);
        let counts = output
            .counts
            .map_or_else(|| Ok(vec![1; handles.len()]), |c| column(c))?;
        let num_tokens: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if (counts.len(), num_tokens) != (handles.len(), tokens.len() as u64) {
            return Err(error(
                "malformed",
                "the columns of an OUTPUT do not fit together",
            ));
        }
        let mut logprobs = entries(output.logprobs)?;
        for (handle, prompt_logprobs) in entries(output.prompt_logprobs)? {
            self.tell(News {
                prompt_logprobs,
                handle,
                ..News::default()
            });
        }
        let mut tokens = tokens.into_iter().map(|token| token as i32);
        for (handle, count) in handles.into_iter().zip(counts) {
            let token_ids = tokens.by_ref().take(count as usize).collect();
            self.tell(News {
                token_ids,
                logprobs: logprobs.remove(&handle).unwrap_or_default(),
                handle,
                ..News::default()
            });
        }
        output.events.into_iter().for_each(|event| self.tell(event));
        Ok(())
    }

    fn tell(&mut self, mut news: News) {
        let sample = match news.finish_reason {
            None => self.handles.get(&news.handle).cloned(),
            Some(_) => self.handles.remove(&news.handle),
        };
        let (id, index) = sample.unwrap_or_default();
        news.index = index;
        self.push(&id, Ok(news));
    }

    fn push(&mut self, request_id: &str, news: Result<News>) {
        if let Some(stream) = self.streams.get_mut(request_id) {
            stream.unread.push_back(news);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.send(0x41, json!({})); // without room for it, the engine finds out by itself
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    rmp_serde::from_slice(body).map_err(|cause| error("malformed", cause))
}

/// The entries of each handle, in their order.
fn entries(columns: Option<Columns>) -> Result<BTreeMap<u32, Vec<TokenLogprobs>>> {
    let columns = columns.unwrap_or_default();
    let (handles, ranks) = (column(columns.handles)?, column(columns.ranks)?);
    let (counts, ids) = (column(columns.counts)?, column(columns.token_ids)?);
    let logprobs = column(columns.logprobs)?;
    let sum: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    let lengths = [ranks.len(), counts.len(), ids.len(), logprobs.len()];
    let num_ids = sum as usize;
    if lengths != [handles.len(), handles.len(), num_ids, num_ids] || counts.contains(&0) {
        let text = "the log probabilities of an OUTPUT do not fit together";
        return Err(error("malformed", text));
    }
    let pairs = ids.into_iter().zip(logprobs);
    let mut candidates = pairs.map(|(id, bits)| (id as i32, f32::from_bits(bits)));
    let mut found = BTreeMap::<_, Vec<_>>::new();
    for ((handle, rank), count) in handles.into_iter().zip(ranks).zip(counts) {
        let candidates = candidates.by_ref().take(count as usize).collect();
        let entry = TokenLogprobs { rank, candidates };
        found.entry(handle).or_default().push(entry);
    }
    Ok(found)
}

fn column(bytes: &[u8]) -> Result<Vec<u32>> {
    let number = |item: &[u8]| item.try_into().map(u32::from_le_bytes);
    let numbers: std::result::Result<_, _> = bytes.chunks(4).map(number).collect();
    numbers.map_err(|_| error("malformed", "a column of an OUTPUT is cut short"))
}
