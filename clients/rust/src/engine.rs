//! A session, for one thread at a time: whoever waits for something takes in all that comes.

use crate::{wire::*, Error};
use std::collections::{HashMap, VecDeque};

/// `timeout`: how long an engine may be silent, 10 s if None. `keys`: for tcp://, as Z85 text: the
/// engine's public key, the client's public key, the client's secret key.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub timeout: Option<std::time::Duration>,
    pub keys: Option<[String; 3]>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum News {
    Tokens(Vec<i32>),
    /// How many tokens were cached; or, with a `finish_reason`, the request's end.
    Event(Event),
}

/// An open session. Dropping it ends the session and aborts its requests.
pub struct Engine {
    socket: zmq::Socket,
    welcome: Option<Welcome>,
    streams: HashMap<String, VecDeque<Result<News, Error>>>, // by request id, until read to the end
    handles: HashMap<u32, String>,
    reply: Option<Reply>,
    num_ids: u64,
    over: Option<Error>,
}

impl Engine {
    pub fn connect(endpoint: &str, options: &Options) -> Result<Engine, Error> {
        let socket = zmq::Context::new().socket(zmq::DEALER)?;
        let timeout_ms = options.timeout.map_or(10_000, |timeout| timeout.as_millis());
        let timeout_ms = i32::try_from(timeout_ms).unwrap_or(i32::MAX);
        socket.set_rcvtimeo(timeout_ms)?;
        socket.set_sndtimeo(timeout_ms)?;
        socket.set_linger(200)?; // for the BYE
        socket.set_rcvhwm(1000)?;
        socket.set_sndhwm(1000)?;
        socket.set_maxmsgsize(16 << 20)?;
        if let Some([server, public, secret]) = &options.keys {
            socket.set_curve_serverkey(server.as_bytes())?;
            socket.set_curve_publickey(public.as_bytes())?;
            socket.set_curve_secretkey(secret.as_bytes())?;
        }
        socket.connect(endpoint)?;
        let (streams, handles) = Default::default();
        let mut engine =
            Engine { socket, welcome: None, streams, handles, reply: None, num_ids: 0, over: None };
        let client = Text(concat!("nanocore-rust/", env!("CARGO_PKG_VERSION")).into());
        engine.send(Hello::OP, &Hello { protocol: [1, 3], client })?;
        while engine.welcome.is_none() {
            engine.poll(true)?;
        }
        Ok(engine)
    }

    pub fn welcome(&self) -> &Welcome {
        self.welcome.as_ref().expect("connect waits for it")
    }

    /// Starts a request and names it. `submit` need not hold the prompt nor an id.
    pub fn submit(&mut self, prompt: &[i32], mut submit: Submit) -> Result<String, Error> {
        self.num_ids += 1;
        submit.request_id = Text(self.num_ids.to_string());
        submit.prompt_token_ids = Bin(prompt.iter().flat_map(|id| id.to_le_bytes()).collect());
        self.send(Submit::OP, &submit)?;
        self.streams.insert(submit.request_id.0.clone(), VecDeque::new());
        Ok(submit.request_id.0)
    }

    /// Waits for news of a request. None: all of it was told, or it was aborted.
    pub fn next(&mut self, request: &str) -> Result<Option<News>, Error> {
        while let Some(stream) = self.streams.get_mut(request) {
            if let Some(news) = stream.pop_front() {
                if !matches!(
                    news,
                    Ok(News::Tokens(_) | News::Event(Event { finish_reason: None, .. }))
                ) {
                    self.streams.remove(request); // nothing follows
                }
                return news.map(Some);
            }
            self.poll(true)?;
        }
        Ok(None)
    }

    /// Ends a request, and forgets what was not read of it.
    pub fn abort(&mut self, request: &str) -> Result<(), Error> {
        self.streams.remove(request);
        self.send(Abort::OP, &Abort { request_ids: vec![Text(request.into())] })
    }

    /// Does a CONTROL, for instance "stats". `file` and `offset` are for "read_file".
    pub fn control(&mut self, name: &str, file: Option<&str>, offset: u64) -> Result<Reply, Error> {
        self.num_ids += 1;
        let (call_id, offset, operation) = (Int(self.num_ids), Int(offset), Text(name.into()));
        let file = file.map(|file| Text(file.into()));
        self.send(Control::OP, &Control { call_id, operation, file, offset })?;
        loop {
            self.poll(true)?;
            match self.reply.take() {
                Some(reply) if reply.call_id == call_id && reply.ok => return Ok(reply),
                Some(reply) if reply.call_id == call_id => {
                    return Err(Error::Refused(reply.message.unwrap_or_default().0))
                }
                _ => {}
            }
        }
    }

    /// The content of one of `welcome().model.files`.
    pub fn read_file(&mut self, name: &str) -> Result<Vec<u8>, Error> {
        let mut content = Vec::new();
        loop {
            let reply = self.control("read_file", Some(name), content.len() as u64)?;
            match reply.data {
                None => return Err(Error::Protocol("REPLY to read_file: no data".into())),
                Some(Bin(data)) if data.is_empty() => return Ok(content),
                Some(Bin(data)) => content.extend(data),
            }
        }
    }

    /// Takes in one message, if need be after waiting for it; false if none came.
    pub fn poll(&mut self, wait: bool) -> Result<bool, Error> {
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        let taken = match self.socket.recv_multipart(if wait { 0 } else { zmq::DONTWAIT }) {
            Err(zmq::Error::EINTR) => return Ok(false),
            Err(zmq::Error::EAGAIN) if !wait => return Ok(false),
            received => received.map_err(Error::from).and_then(|frames| self.take(&frames)),
        };
        self.over = taken.as_ref().err().cloned();
        taken.map(|()| true)
    }

    fn send(&self, op: u8, body: &impl serde::Serialize) -> Result<(), Error> {
        match &self.over {
            Some(error) => Err(error.clone()),
            None => Ok(self.socket.send_multipart([vec![op], encode(body)], 0)?),
        }
    }

    fn take(&mut self, frames: &[Vec<u8>]) -> Result<(), Error> {
        let (op, body) = match frames {
            [op, body] if op.len() == 1 => (op[0], &body[..]),
            _ => {
                return Err(Error::Protocol(format!("{} frames are no op and body", frames.len())))
            }
        };
        match op {
            Welcome::OP => self.welcome = Some(decode(body)?),
            Refused::OP => return Err(Error::Refused(decode::<Refused>(body)?.message.0)),
            Accepted::OP => {
                let Accepted { request_id, handle, .. } = decode(body)?;
                self.handles.insert(handle, request_id.0);
            }
            Output::OP => self.deliver(decode(body)?)?,
            Failure::OP => {
                let failure: Failure = decode(body)?;
                let id = failure.request_id.as_ref().filter(|_| failure.code.0 != "engine_dead");
                match id.map(|id| self.streams.get_mut(&id.0)) {
                    None => return Err(Error::Engine(failure)),
                    Some(None) => {} // it was aborted
                    Some(Some(stream)) => stream.push_back(Err(Error::Engine(failure))),
                }
            }
            Ping::OP => {
                let Ping { nonce } = decode(body)?;
                self.send(Pong::OP, &Pong { nonce, num_steps: None })?;
            }
            Pong::OP => decode(body).map(|_: Pong| ())?,
            Reply::OP => self.reply = Some(decode(body)?),
            Bye::OP => return Err(Error::Dead(format!("BYE {}", decode::<Bye>(body)?.reason.0))),
            _ => return Err(Error::Protocol(format!("op 0x{op:02x} is not an engine's"))),
        }
        Ok(())
    }

    fn deliver(&mut self, output: Output) -> Result<(), Error> {
        let handles = column(&output.handles, u32::from_le_bytes)?;
        let tokens = column(&output.tokens, i32::from_le_bytes)?;
        let ones = || Ok(vec![1; handles.len()]);
        let counts =
            output.counts.map_or_else(ones, |counts| column(&counts, u32::from_le_bytes))?;
        let num_tokens: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if (counts.len(), num_tokens) != (handles.len(), tokens.len() as u64) {
            return Err(Error::Protocol("OUTPUT: the columns do not fit together".into()));
        }
        let mut tokens = tokens.into_iter();
        for (handle, count) in handles.into_iter().zip(counts) {
            let new = tokens.by_ref().take(count as usize).collect();
            self.tell(handle, News::Tokens(new));
        }
        for event in output.events {
            let (handle, ended) = (event.handle, event.finish_reason.is_some());
            self.tell(handle, News::Event(event));
            if ended {
                self.handles.remove(&handle);
            }
        }
        Ok(())
    }

    fn tell(&mut self, handle: u32, news: News) {
        let id = self.handles.get(&handle);
        if let Some(stream) = id.and_then(|id| self.streams.get_mut(id)) {
            stream.push_back(Ok(news));
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Without room for it, the engine finds out by itself.
        let _ = self.socket.send_multipart([vec![Bye::OP], vec![0x80]], zmq::DONTWAIT);
    }
}

fn column<T>(column: &Bin, decode: fn([u8; 4]) -> T) -> Result<Vec<T>, Error> {
    let items = column.0.chunks_exact(4);
    match items.remainder() {
        [] => Ok(items.map(|item| decode([item[0], item[1], item[2], item[3]])).collect()),
        _ => Err(Error::Protocol("OUTPUT: a column is cut short".into())),
    }
}
