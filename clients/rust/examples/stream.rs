//! Streams one request's tokens: `stream ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]`, greedily.

use nanocore_client::{Engine, News, Options, Sampling, Submit};
use std::error::Error;
use std::io::{stdout, Write};

fn stream(endpoint: &str, prompt: &str, max_tokens: &str) -> Result<(), Box<dyn Error>> {
    let prompt = prompt.split(',').map(|id| id.trim().parse()).collect::<Result<Vec<i32>, _>>()?;
    let max_tokens = Some(max_tokens.parse()?);
    let sampling = Some(Sampling { temperature: 0.0, max_tokens, ..Sampling::default() });
    let mut engine = Engine::connect(endpoint, &Options::default())?;
    let request = engine.submit(&prompt, Submit { sampling, ..Submit::default() })?;
    while let Some(news) = engine.next(&request)? {
        match news {
            News::Tokens(token_ids) => {
                for token_id in token_ids {
                    writeln!(stdout(), "{token_id}")?;
                }
            }
            News::Event(event) => {
                if let Some(reason) = event.finish_reason {
                    writeln!(stdout(), "finish_reason: {}", reason.0)?;
                }
            }
        }
        stdout().flush()?;
    }
    Ok(())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [endpoint, prompt] => stream(endpoint, prompt, "16"),
        [endpoint, prompt, max_tokens] => stream(endpoint, prompt, max_tokens),
        _ => Err("usage: stream ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]".into()),
    };
    if let Err(error) = done {
        eprintln!("{}", error.to_string().replace('\n', " "));
        std::process::exit(1);
    }
}
