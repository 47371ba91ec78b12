//! Two samples that outlive their engine: kill it, start another one at the endpoint within a
//! minute, and they go on: `resume ENDPOINT PROMPT_TOKEN_IDS MAX_TOKENS`. Prints each sample's index
//! and its tokens, one a line, and how each ended.

use nanocore_client::{json, Engine};
use std::error::Error;
use std::io::{stdout, Write};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, prompt, max_tokens] = &args[..] else {
        return Err("usage: resume ENDPOINT PROMPT_TOKEN_IDS MAX_TOKENS".into());
    };
    let ids = prompt.split(',').map(|id| id.trim().parse());
    let prompt = ids.collect::<Result<Vec<i32>, _>>()?;
    let max_tokens: u64 = max_tokens.parse()?;
    let sampling = json!({
        "n": 2, "seed": 7, "presence_penalty": 0.5, "ignore_eos": true, "max_tokens": max_tokens,
    });
    let mut engine = Engine::connect(endpoint, 10_000, None)?.resuming(60)?;
    let request = engine.submit(&prompt, json!({ "sampling": sampling }))?;
    while let Some(news) = engine.next(&request)? {
        for token_id in news.token_ids {
            writeln!(stdout(), "{} {token_id}", news.index)?;
        }
        if let Some(reason) = news.finish_reason {
            writeln!(stdout(), "{} finish_reason: {reason}", news.index)?;
        }
        stdout().flush()?;
    }
    Ok(())
}
