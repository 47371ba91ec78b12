//! Against a real engine, whose endpoint is in NANOCORE_ENDPOINT; nanocore's tests run these.

use nanocore_client::{wire::Stats, Engine, News, Options, Sampling, Submit};
use std::collections::HashMap;

fn connect() -> Engine {
    let endpoint = std::env::var("NANOCORE_ENDPOINT").expect("NANOCORE_ENDPOINT");
    Engine::connect(&endpoint, &Options::default()).expect("a session")
}

fn stats(engine: &mut Engine) -> Stats {
    engine.control("stats", None, 0).expect("a reply").stats.expect("stats")
}

fn greedy(max_tokens: u64) -> Submit {
    let max_tokens = Some(max_tokens);
    let sampling =
        Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Default::default() };
    Submit { sampling: Some(sampling), ..Submit::default() }
}

fn read(engine: &mut Engine, request: &str) -> (Vec<i32>, String) {
    let (mut token_ids, mut finish_reason) = (Vec::new(), String::new());
    while let Some(news) = engine.next(request).expect("the request succeeds") {
        match news {
            News::Tokens(new) => token_ids.extend(new),
            News::Event(event) => {
                finish_reason = event.finish_reason.map_or(finish_reason, |r| r.0)
            }
        }
    }
    (token_ids, finish_reason)
}

#[test]
#[ignore = "needs an engine"]
fn several_requests_at_once_get_what_each_gets_alone() {
    let mut engine = connect();
    let prompts: [&[i32]; 4] = [&[1, 2, 3], &[5], &[8, 9], &[1, 2, 4, 3, 5, 6, 7]];
    let mut alone = HashMap::new();
    for prompt in prompts {
        let request = engine.submit(prompt, greedy(12)).expect("sent");
        alone.insert(prompt, read(&mut engine, &request));
    }
    engine.control("pause", None, 0).expect("paused"); // so that all run in the same steps
    let mut submit = |prompt| (prompt, engine.submit(prompt, greedy(12)).expect("sent"));
    let requests = prompts.map(&mut submit);
    engine.control("resume", None, 0).expect("goes on");
    for (prompt, request) in requests.iter().rev() {
        let (token_ids, finish_reason) = read(&mut engine, request);
        assert_eq!((token_ids.len(), &*finish_reason), (12, "length"));
        assert_eq!(alone[prompt].0, token_ids);
    }
}

#[test]
#[ignore = "needs an engine"]
fn one_aborted_and_one_left_are_both_aborted() {
    let (mut watcher, mut engine) = (connect(), connect());
    let before = stats(&mut watcher);
    watcher.control("pause", None, 0).expect("paused"); // so that neither can end by itself
    let aborted = engine.submit(&[1, 2, 3], greedy(50)).expect("sent");
    engine.submit(&[1, 2, 3], greedy(50)).expect("sent");
    assert_eq!(stats(&mut engine).num_requests_waiting, before.num_requests_waiting + 2);
    engine.abort(&aborted).expect("sent");
    drop(engine);
    while stats(&mut watcher).num_aborts < before.num_aborts + 2 {}
    watcher.control("resume", None, 0).expect("goes on");
    assert_eq!(stats(&mut watcher).num_requests_waiting, before.num_requests_waiting);
}

#[test]
#[ignore = "needs an engine"]
fn files_are_as_long_as_the_model_card_says() {
    let mut engine = connect();
    let files = engine.welcome().model.files.clone();
    assert!(files.iter().any(|file| file.name.0 == "tokenizer.json"));
    for file in files {
        let content = engine.read_file(&file.name.0).expect("a file");
        assert_eq!(content.len() as u64, file.num_bytes);
    }
    assert!(engine.read_file("model.safetensors").is_err());
}
