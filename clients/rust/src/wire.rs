//! The messages, in tables like PROTOCOL.md's: `field: type = default`. What has no default is
//! required, what has its default is not sent, what is not named here is ignored. Serde's derived
//! types will not do: maps are no arrays here, `str` is no `bin`, and the last of equal keys counts.

use crate::Error;
use serde::de::{Deserialize, Deserializer, Error as Error_, IgnoredAny, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::io::Cursor;

/// Lets a type be deserialized through these methods of a visitor only.
macro_rules! visited {
    ($name:ident, $($visit:tt)*) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Only;
                impl<'de> Visitor<'de> for Only {
                    type Value = $name;
                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str(stringify!($name))
                    }
                    $($visit)*
                }
                deserializer.deserialize_any(Only)
            }
        }
    };
}

macro_rules! maps {
    ($($name:ident $(op $op:literal)? $(impl $all:ident)? { $($field:ident: $type:ty $(= $default:expr)?),* $(,)? })*) => {$(
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name { $(pub $field: $type),* }
        $(impl $name { pub const OP: u8 = $op; })?
        $(impl $all for $name {
            fn default() -> Self { decode(&[0x80]).expect("all fields have defaults") }
        })?
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_map(None)?;
                $(if true $(&& <$type>::ne(&self.$field, &$default))? {
                    map.serialize_entry(stringify!($field), &self.$field)?;
                })*
                map.end()
            }
        }
        visited!($name, fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<$name, M::Error> {
            $(let mut $field: Option<$type> = None$(.or(Some($default)))?;)*
            while let Some(Text(key)) = map.next_key()? {
                match key.as_str() {
                    $(stringify!($field) => $field = Some(map.next_value()?),)*
                    _ => drop(map.next_value::<IgnoredAny>()?),
                }
            }
            $(let $field = $field.ok_or_else(|| Error_::missing_field(stringify!($field)))?;)*
            Ok($name { $($field),* })
        });
    )*};
}

/// A `str` on the wire.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize)]
pub struct Text(pub String);
visited! { Text, fn visit_str<E>(self, text: &str) -> Result<Text, E> { Ok(Text(text.into())) } }

/// A `bin` on the wire.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize)]
pub struct Bin(#[serde(with = "serde_bytes")] pub Vec<u8>);
visited! { Bin, fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bin, E> { Ok(Bin(bytes.into())) } }

/// 0 to 2^53 - 1.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Int(pub u64);
visited! { Int,
    fn visit_i64<E: Error_>(self, number: i64) -> Result<Int, E> { self.visit_u64(number as u64) }
    fn visit_u64<E: Error_>(self, number: u64) -> Result<Int, E> {
        Some(Int(number)).filter(|_| number < 1 << 53).ok_or_else(|| E::custom("not below 2^53"))
    }
}

/// "stop", "length", "abort" or "error".
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct FinishReason(pub String);
visited! { FinishReason,
    fn visit_str<E: Error_>(self, text: &str) -> Result<FinishReason, E> {
        let known = ["stop", "length", "abort", "error"].contains(&text);
        known.then(|| FinishReason(text.into())).ok_or_else(|| E::custom("no such finish_reason"))
    }
}

maps! {
    Sampling impl Default {
        temperature: f64 = 1.0, top_p: f64 = 1.0, top_k: i64 = 0, min_p: f64 = 0.0,
        seed: Option<u64> = None, max_tokens: Option<u64> = None, stop_token_ids: Vec<i64> = vec![],
        ignore_eos: bool = false, skip_reading_prefix_cache: bool = false,
    }
    ModelFile { name: Text, num_bytes: u64, sha256: Text }
    ModelCard {
        model: Text, architecture: Text, dtype: Text, vocab_size: u64, max_model_len: u64,
        eos_token_ids: Vec<i64>, block_size: u64, num_blocks: u64,
        default_sampling: Sampling = Sampling::default(), files: Vec<ModelFile> = vec![],
    }
    Limits {
        max_frame_bytes: u64, max_num_seqs: u64, max_request_id_chars: u64 = 256,
        max_cache_salt_chars: u64 = 1024, ping_interval_ms: u64, session_timeout_ms: u64,
        max_num_queued_reqs: Option<u64> = None, max_num_queued_tokens: Option<u64> = None,
        max_file_chunk_bytes: u64 = 65536,
    }
    Event {
        handle: u32, num_cached_tokens: Option<u64> = None, finish_reason: Option<FinishReason> = None,
        stop_reason: Option<i64> = None, message: Option<Text> = None,
    }
    Stats {
        num_requests_running: u64, num_requests_waiting: u64, kv_cache_usage_perc: f64,
        num_blocks: u64, num_free_blocks: u64, prefix_cache_queries: u64, prefix_cache_hits: u64,
        num_preemptions: u64, num_aborts: u64, prompt_tokens: u64, generation_tokens: u64,
        num_steps: u64, paused: bool, prefix_cache_hit_rate: f64 = 0.0, num_clients: u64 = 0,
        num_protocol_errors: u64 = 0,
    }
    Hello op 0x01 { protocol: [u64; 2], client: Text = Text::default() }
    Welcome op 0x02 {
        protocol: [u64; 2], session: Text, engine_instance: Text, model: ModelCard, limits: Limits,
        capabilities: Vec<Text> = vec![],
    }
    Refused op 0x03 { message: Text, supported: Vec<[u64; 2]> }
    Submit op 0x10 impl Default {
        request_id: Text = Text::default(), prompt_token_ids: Bin = Bin::default(),
        sampling: Option<Sampling> = None,
        priority: i32 = 0, cache_salt: Option<Text> = None,
    }
    Accepted op 0x11 { request_id: Text, handle: u32, seed: u64 }
    Output op 0x12 {
        handles: Bin = Bin::default(), tokens: Bin = Bin::default(), counts: Option<Bin> = None,
        events: Vec<Event> = vec![],
    }
    Failure op 0x13 {
        code: Text, message: Text, request_id: Option<Text> = None, retry_after_s: Option<f64> = None,
    }
    Abort op 0x14 { request_ids: Vec<Text> }
    Ping op 0x20 { nonce: Int = Int(0) }
    Pong op 0x21 { nonce: Int = Int(0), num_steps: Option<Int> = None }
    Control op 0x30 { call_id: Int, operation: Text, file: Option<Text> = None, offset: Int = Int(0) }
    Reply op 0x31 {
        call_id: Int, ok: bool = true, message: Option<Text> = None, stats: Option<Stats> = None,
        data: Option<Bin> = None,
    }
    Bye op 0x41 { reason: Text = Text::default() }
}

pub fn encode(body: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(body).expect("memory takes every message")
}

/// A message's body: one map, and nothing after it.
pub fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, Error> {
    let mut reader = rmp_serde::Deserializer::new(Cursor::new(bytes));
    reader.set_max_depth(64); // maps and arrays in one another: the messages have 4
    let body = T::deserialize(&mut reader).map_err(|error| Error::Protocol(error.to_string()))?;
    match bytes.len() as u64 - reader.position() {
        0 => Ok(body),
        excess => Err(Error::Protocol(format!("{excess} bytes follow the body"))),
    }
}
