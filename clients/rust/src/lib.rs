//! A client of the nanocore inference engine: token ids in, token ids out. See README.md.
use serde::{Deserialize, Serialize};
pub use serde_json::{json, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};
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
    /// "repetition", with `repetition_detection`.
    pub stop_cause: Option<String>,
    pub message: Option<String>,
    /// With `pooling`: the prompt's, as a float32 column.
    #[serde(with = "serde_bytes")]
    #[serde(default)]
    pub embedding: Option<Vec<u8>>,
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
    seed: u64,
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

/// News and errors that are not read yet, of a request with so many samples whose end is not read.
struct Stream {
    unread: VecDeque<Result<News>>,
    num_open: u64,
    prompt: Vec<u8>,
    fields: Value,
    start: Instant,
    samples: Vec<Sample>,
}

/// What it takes to go on with a sample. num_lost: how often in a row without a token.
#[derive(Clone, Default)]
struct Sample {
    seed: Option<u64>,
    tokens: Vec<u8>,
    is_over: bool,
    num_lost: u32,
}

/// It may be what ends engines.
const MAX_LOST: u32 = 3;
const NEW_PARAMETERS: [(&str, u64); 13] = [
    ("repetition_detection", 14),
    ("pooling", 7),
    ("structured_outputs", 6),
    ("n", 5),
    ("min_tokens", 5),
    ("presence_penalty", 5),
    ("frequency_penalty", 5),
    ("repetition_penalty", 5),
    ("allowed_token_ids", 5),
    ("logprobs", 5),
    ("prompt_logprobs", 5),
    ("logit_bias", 5),
    ("bad_words_token_ids", 5),
];

struct Address {
    endpoint: String,
    timeout_ms: i32,
    keys: Option<[String; 3]>,
}

impl Address {
    /// The socket, and another one that hears when its connection is closed.
    fn dial(&self) -> Result<[zmq::Socket; 2]> {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER)?; // its high-water marks are 1000
        let watch = context.socket(zmq::PAIR)?;
        socket.monitor("inproc://watch", zmq::SocketEvent::DISCONNECTED as i32)?;
        watch.connect("inproc://watch")?;
        socket.set_linger(200)?; // for the BYE
        socket.set_maxmsgsize(16 << 20)?;
        if let Some([server, public, secret]) = &self.keys {
            socket.set_curve_serverkey(server.as_bytes())?;
            socket.set_curve_publickey(public.as_bytes())?;
            socket.set_curve_secretkey(secret.as_bytes())?;
        }
        socket.connect(&self.endpoint)?;
        Ok([socket, watch])
    }
}

/// An open session, for one thread: whoever waits takes in all that comes. Dropping it says BYE.
pub struct Engine {
    /// What the engine said of itself, for instance `welcome["model"]["max_model_len"]`.
    pub welcome: Value,
    address: Address,
    resume: Duration,
    num_sessions: u64,
    socket: zmq::Socket,
    watch: zmq::Socket,
    streams: HashMap<String, Stream>, // by request id, until read to the end
    unanswered: HashMap<String, (String, Vec<u32>)>, // streams and their samples, by SUBMITs' ids
    handles: HashMap<u32, (String, u32)>, // to streams and their samples
    replies: HashMap<u64, Result<(Value, Vec<u8>)>>, // by call_id
    num_ids: u64,
    over: Result<()>,
}

impl Engine {
    /// An engine silent for `timeout_ms`, usually 10000, is given up. tcp:// needs `keys`, as Z85
    /// text: the public one of the engine, the public one of the client and its secret one.
    pub fn connect(endpoint: &str, timeout_ms: i32, keys: Option<[&str; 3]>) -> Result<Engine> {
        if keys.is_none() && endpoint.starts_with("tcp://") {
            return Err(error(
                "refused",
                "tcp:// needs keys: anybody could answer there",
            ));
        }
        let address = Address {
            endpoint: endpoint.into(),
            timeout_ms,
            keys: keys.map(|keys| keys.map(String::from)),
        };
        let (welcome, streams, unanswered, handles, replies, num_ids) = Default::default();
        let [socket, watch] = address.dial()?;
        let mut new = Engine {
            welcome,
            socket,
            watch,
            address,
            resume: Duration::ZERO,
            num_sessions: 0,
            streams,
            unanswered,
            handles,
            replies,
            num_ids,
            over: Ok(()),
        };
        new.hello()?;
        Ok(new)
    }

    /// Requests outlive their engine if another one serves the endpoint within so many seconds:
    /// they go on with it, behind their tokens so far.
    pub fn resuming(mut self, within_s: u64) -> Result<Engine> {
        self.resume = Duration::from_secs(within_s);
        Ok(self)
    }

    fn hello(&mut self) -> Result<()> {
        self.num_sessions += 1;
        self.welcome = Value::Null;
        let body = json!({ "protocol": [1, 14], "client": "nanocore-rust" });
        self.send(0x01, body)?;
        while self.welcome.is_null() {
            self.take_in(true)?;
        }
        Ok(())
    }

    fn knows(&self, name: &str, since: u64) -> Result<()> {
        match self.welcome["protocol"][1].as_u64() < Some(since) {
            true => Err(error("refused", format!("{name} needs protocol 1.{since}"))),
            false => Ok(()),
        }
    }

    /// Starts a request and names it. `fields`: an object with `sampling` and others of SUBMIT.
    /// With `n` in `sampling` there are so many samples; `News::index` says of which one news are.
    pub fn submit(&mut self, prompt: &[i32], fields: Value) -> Result<String> {
        let sampling = &fields["sampling"];
        let num_open = sampling["n"].as_u64().unwrap_or(1);
        for (name, since) in NEW_PARAMETERS {
            if !sampling[name].is_null() {
                self.knows(name, since)?;
            }
        }
        if !fields["timeout_s"].is_null() {
            self.knows("timeout_s", 9)?;
        }
        self.num_ids += 1;
        let request_id = self.num_ids.to_string();
        let stream = Stream {
            unread: VecDeque::new(),
            num_open,
            prompt: prompt.iter().flat_map(|id| id.to_le_bytes()).collect(),
            fields: fields.clone(),
            start: Instant::now(),
            samples: vec![Sample::default(); num_open as usize],
        };
        self.streams.insert(request_id.clone(), stream);
        let indices = (0..num_open as u32).collect();
        let sent = self.request(&request_id, &request_id, indices, fields, Vec::new());
        if sent.is_err() {
            self.streams.remove(&request_id);
        }
        sent.map(|()| request_id)
    }

    fn request(
        &mut self,
        name: &str,
        request_id: &str,
        indices: Vec<u32>,
        fields: Value,
        tokens: Vec<u8>,
    ) -> Result<()> {
        let object = BTreeMap::<String, Raw>::deserialize(fields);
        let mut body = object.map_err(|cause| error("refused", cause))?;
        body.insert("request_id".into(), Raw::Scalar(json!(name)));
        let prompt = self.streams[request_id].prompt.clone();
        body.insert("prompt_token_ids".into(), Raw::Bin(prompt));
        if !tokens.is_empty() {
            body.insert("output_token_ids".into(), Raw::Bin(tokens));
        }
        self.send(0x10, body)?;
        let asked = (request_id.into(), indices);
        self.unanswered.insert(name.into(), asked);
        Ok(())
    }

    /// A new session, and in it all that has not ended, behind its tokens.
    fn go_on(&mut self) -> Result<()> {
        let end = Instant::now() + self.resume;
        let default_sampling = self.welcome["model"]["default_sampling"].clone();
        self.unanswered.clear();
        self.handles.clear();
        while let Err(cause) = self.reopen() {
            if Instant::now() > end {
                return Err(cause);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let mut request_ids: Vec<_> = self.streams.keys().cloned().collect();
        request_ids.sort_by_key(|id| id.parse::<u64>().ok()); // as they came
        for id in request_ids {
            if let Err(cause) = self.resume(&id, &default_sampling) {
                self.over.clone()?;
                self.push(&id, Err(cause)); // it alone cannot go on
            }
        }
        Ok(())
    }

    fn reopen(&mut self) -> Result<()> {
        [self.socket, self.watch] = self.address.dial()?;
        self.over = Ok(());
        self.hello()
    }

    fn resume(&mut self, request_id: &str, default_sampling: &Value) -> Result<()> {
        let stream = &self.streams[request_id];
        let mut fields = stream.fields.clone();
        if let Some(timeout_s) = fields["timeout_s"].as_f64() {
            let left_s = timeout_s - stream.start.elapsed().as_secs_f64();
            fields["timeout_s"] = json!(left_s.max(1e-3));
        }
        let samples = stream.samples.clone();
        if samples[0].seed.is_none() {
            let indices = (0..samples.len() as u32).collect(); // was not accepted
            return self.request(request_id, request_id, indices, fields, Vec::new());
        }
        if fields["sampling"].is_null() {
            fields["sampling"] = default_sampling.clone();
        }
        for (i, sample) in samples.into_iter().enumerate().filter(|(_, s)| !s.is_over) {
            let stream = self.streams.get_mut(request_id).expect("it was there");
            stream.fields["sampling"] = fields["sampling"].clone();
            stream.samples[i].num_lost += 1;
            if stream.samples[i].num_lost == MAX_LOST {
                let text = "lost several times in a row without a token";
                return Err(error("engine_dead", text));
            }
            let mut fields = fields.clone();
            fields["sampling"]["n"] = json!(1);
            fields["sampling"]["seed"] = json!(sample.seed);
            if i > 0 || !sample.tokens.is_empty() {
                fields["sampling"]["prompt_logprobs"] = Value::Null;
            }
            if !sample.tokens.is_empty() {
                self.knows("output_token_ids", 9)?;
            }
            let name = format!("{request_id}.{i}");
            self.request(&name, request_id, vec![i as u32], fields, sample.tokens)?;
        }
        Ok(())
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
        let stream = self.streams.remove(request_id);
        let num_samples = stream.map_or(0, |stream| stream.samples.len());
        let mut names = vec![request_id.to_string()];
        if self.num_sessions > 1 {
            names.extend((0..num_samples).map(|i| format!("{request_id}.{i}")));
        }
        self.send(0x14, json!({ "request_ids": names }))
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
        let num_sessions = self.num_sessions;
        while !self.replies.contains_key(&self.num_ids) {
            self.poll(true)?;
            if self.num_sessions != num_sessions {
                return Err(error("bye", "the session ended before the reply"));
            }
        }
        self.replies
            .remove(&self.num_ids)
            .expect("the loop ends with it")
    }

    /// Takes in one message, if need be after waiting for it; false if none came.
    pub fn poll(&mut self, wait: bool) -> Result<bool> {
        self.over.clone()?;
        let took = self.take_in(wait);
        let lost = ["silence", "bye", "engine_dead", "no_session"];
        match took {
            Err(cause) if !self.resume.is_zero() && lost.contains(&&*cause.code) => {
                self.over = self.go_on();
                self.over.clone().map(|()| true)
            }
            took => took,
        }
    }

    fn take_in(&mut self, wait: bool) -> Result<bool> {
        let mut items = [&self.socket, &self.watch].map(|one| one.as_poll_item(zmq::POLLIN));
        let patience_ms = i64::from(wait) * i64::from(self.address.timeout_ms);
        let waited = zmq::poll(&mut items, patience_ms);
        let is_closed = items[1].is_readable();
        self.over = match waited.and_then(|_| self.socket.recv_multipart(zmq::DONTWAIT)) {
            Err(zmq::Error::EINTR) => return Ok(false), // a signal
            Err(zmq::Error::EAGAIN) if is_closed => Err(error("engine_dead", "closed")),
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
                let (id, indices) = self.unanswered.remove(&id).unwrap_or_default();
                for (i, index) in indices.into_iter().enumerate() {
                    let handle = handle.wrapping_add(i as u32);
                    self.handles.insert(handle, (id.clone(), index));
                    if let Some(stream) = self.streams.get_mut(&id) {
                        let seed = body.seed.wrapping_add(i as u64) % (1 << 53);
                        stream.samples[index as usize].seed.get_or_insert(seed);
                    }
                }
            }
            0x12 => return self.deliver(body),
            0x13 => match read::<Error>(bytes)? {
                why if why.request_id.is_none() || why.code == "engine_dead" => return Err(why),
                why => {
                    let name = body.request_id.unwrap_or_default();
                    let (id, _) = self.unanswered.remove(&name).unwrap_or_default();
                    if self.resume.is_zero() || why.code != "draining" {
                        self.push(&id, Err(why)); // otherwise the next engine gets it
                    }
                }
            },
            0x20 => return self.send(0x21, json!({ "nonce": body.nonce })),
            0x21 | 0x40 => {} // PONG, DRAINING
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
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let sample = &mut stream.samples[index as usize];
        for token_id in &news.token_ids {
            sample.tokens.extend(token_id.to_le_bytes());
            sample.num_lost = 0;
        }
        let is_abort = news.finish_reason.as_deref() == Some("abort");
        if is_abort && news.message.is_some() && !self.resume.is_zero() {
            return; // the engine stops: the next one gets it
        }
        sample.is_over |= news.finish_reason.is_some();
        stream.unread.push_back(Ok(news));
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
