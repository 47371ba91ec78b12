//! Streams one request's tokens: `stream ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]`, greedily; of a
//! structured output, if a fourth argument is one, as in `{"choice": ["yes", "no"]}`.

use nanocore_client::{json, Engine};
use std::error::Error;
use std::io::{stdout, Write};

fn stream(
    endpoint: &str,
    prompt: &str,
    max_tokens: &str,
    structured: &str,
) -> Result<(), Box<dyn Error>> {
    let prompt = prompt
        .split(',')
        .map(|id| id.trim().parse())
        .collect::<Result<Vec<i32>, _>>()?;
    let max_tokens: u64 = max_tokens.parse()?;
    let mut engine = Engine::connect(endpoint, 10_000, None)?;
    let mut sampling = json!({ "temperature": 0, "max_tokens": max_tokens });
    if !structured.is_empty() {
        sampling["structured_outputs"] = structured.parse()?;
    }
    let request = engine.submit(&prompt, json!({ "sampling": sampling }))?;
    while let Some(news) = engine.next(&request)? {
        for token_id in news.token_ids {
            writeln!(stdout(), "{token_id}")?;
        }
        if let Some(reason) = news.finish_reason {
            writeln!(stdout(), "finish_reason: {reason}")?;
        }
        stdout().flush()?;
    }
    Ok(())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [endpoint, prompt] => stream(endpoint, prompt, "16", ""),
        [endpoint, prompt, max_tokens] => stream(endpoint, prompt, max_tokens, ""),
        [endpoint, prompt, max_tokens, structured] => {
            stream(endpoint, prompt, max_tokens, structured)
        }
        _ => {
            Err("usage: stream ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS [STRUCTURED_OUTPUTS]]".into())
        }
    };
    if let Err(error) = done {
        eprintln!("{}", error.to_string().replace('\n', " "));
        std::process::exit(1);
    }
}
