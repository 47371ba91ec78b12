//! MessagePack as JSON, and what must be in it.

use crate::Value;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What engines send: an op or a map's name, then its fields. `field?` may be absent; fields that
/// are not named are ignored. `uint` ends at 2^53 - 1, a `column` has 4 bytes per number.
const MAPS: &str = "
    0x02 protocol:version session:str engine_instance:str model:Model limits:Limits
        capabilities?:[str]; File name:str num_bytes:uint sha256:str;
    Model model:str architecture:str dtype:str vocab_size:uint max_model_len:uint block_size:uint
        num_blocks:uint eos_token_ids:[int] default_sampling?:Sampling files?:[File];
    Sampling temperature?:float top_p?:float top_k?:int min_p?:float seed?:uint|nil ignore_eos?:bool
        max_tokens?:uint|nil stop_token_ids?:[int] skip_reading_prefix_cache?:bool;
    Limits max_frame_bytes:uint max_num_seqs:uint max_request_id_chars?:uint ping_interval_ms:uint
        max_cache_salt_chars?:uint session_timeout_ms:uint max_num_queued_reqs?:uint|nil
        max_num_queued_tokens?:uint|nil max_file_chunk_bytes?:uint;
    0x03 message:str supported:[version]; 0x11 request_id:str handle:u32 seed:uint;
    0x12 handles?:column tokens?:column counts?:column|nil events?:[Event];
    Event handle:u32 num_cached_tokens?:uint|nil finish_reason?:'stop'|'length'|'abort'|'error'|nil
        message?:str|nil stop_reason?:int|nil;
    0x13 code:str message:str request_id?:str|nil retry_after_s?:float|nil;
    0x20 nonce?:uint; 0x21 nonce?:uint num_steps?:uint|nil; 0x41 reason?:str;
    0x31 call_id:uint ok?:bool message?:str|nil stats?:Stats|nil data?:bin|nil;
    Stats num_requests_running:uint num_requests_waiting:uint kv_cache_usage_perc:float
        num_blocks:uint num_free_blocks:uint prefix_cache_queries:uint prefix_cache_hits:uint
        num_preemptions:uint num_aborts:uint prompt_tokens:uint generation_tokens:uint num_steps:uint
        paused:bool prefix_cache_hit_rate?:float num_clients?:uint num_protocol_errors?:uint";

/// Any MessagePack. Of equal keys the last one counts. As JSON, a `bin` is an array of its bytes.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Raw {
    Map(BTreeMap<String, Raw>),
    Array(Vec<Raw>),
    Scalar(Value),
    Bin(#[serde(with = "serde_bytes")] Vec<u8>),
}

/// The op and the body of a message from an engine, if it is one.
pub fn decode(frames: &[Vec<u8>]) -> Option<(u8, Value)> {
    let (op, body) = frames.split_last().map(|(body, op)| (op.concat(), body))?;
    let mut reader = rmp_serde::Deserializer::new(std::io::Cursor::new(body));
    reader.set_max_depth(64); // of maps and arrays in one another: the messages have 4
    let raw = Raw::deserialize(&mut reader).ok()?;
    let is_whole = frames.len() == 2 && op.len() == 1 && reader.position() == body.len() as u64;
    let message = (op.first().copied()?, serde_json::to_value(&raw).ok()?);
    Some(message).filter(|(op, _)| is_whole && fits(&raw, &format!("0x{op:02x}")))
}

fn fits(raw: &Raw, kind: &str) -> bool {
    kind.split('|').any(|kind| match raw {
        Raw::Map(map) => {
            let mut maps = MAPS.split(';').map(str::split_whitespace);
            let fields = maps.find(|fields| fields.clone().next() == Some(kind));
            fields.map_or(false, |fields| {
                fields.filter_map(|field| field.split_once(':')).all(|(key, kind)| {
                    let value = map.get(key.trim_end_matches('?'));
                    value.map_or(key.ends_with('?'), |value| fits(value, kind))
                })
            })
        }
        Raw::Array(items) => match kind.strip_prefix('[') {
            Some(item) => items.iter().all(|value| fits(value, item.trim_end_matches(']'))),
            None => kind == "version" && items.len() == 2 && items.iter().all(|v| fits(v, "uint")),
        },
        Raw::Bin(bytes) => kind == "bin" || kind == "column" && bytes.len() % 4 == 0,
        Raw::Scalar(Value::Number(number)) => match (kind, number.as_i64()) {
            ("int", Some(number)) => number.unsigned_abs() < 1 << 53,
            ("uint", Some(number)) => (0..1 << 53).contains(&number),
            ("u32", Some(number)) => (0..1 << 32).contains(&number),
            _ => kind == "float",
        },
        Raw::Scalar(Value::String(text)) => kind == "str" || kind == format!("'{text}'"),
        Raw::Scalar(scalar) => kind == if scalar.is_null() { "nil" } else { "bool" },
    })
}
