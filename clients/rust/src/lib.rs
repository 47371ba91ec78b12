//! A client of the nanocore inference engine: token ids in, token ids out. See README.md.

mod engine;
pub mod wire;
pub use engine::{Engine, News, Options};
pub use wire::{FinishReason, Sampling, Submit};

/// What can go wrong. It ends the session, save for `Engine` with a request_id, and `Refused`.
#[derive(Debug, Clone, PartialEq)]
pub enum Error {
    /// The engine would not open a session, or not do what a CONTROL asked.
    Refused(String),
    /// An ERROR of the engine: `code`, `message`, `request_id`, `retry_after_s`.
    Engine(wire::Failure),
    /// The engine sent what is no message of this protocol.
    Protocol(String),
    /// The engine said BYE, or nothing for `Options::timeout`.
    Dead(String),
    Zmq(zmq::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Refused(why) => write!(f, "REFUSED: {why}"),
            Error::Engine(failure) => write!(f, "ERROR {}: {}", failure.code.0, failure.message.0),
            Error::Protocol(what) => write!(f, "malformed message: {what}"),
            Error::Dead(why) => write!(f, "the engine is gone: {why}"),
            Error::Zmq(error) => write!(f, "ZeroMQ: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<zmq::Error> for Error {
    fn from(error: zmq::Error) -> Self {
        match error {
            zmq::Error::EAGAIN => Error::Dead("not a word from it for Options::timeout".into()),
            _ => Error::Zmq(error),
        }
    }
}
