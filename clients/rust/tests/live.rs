//! Against a real engine, whose endpoint is in NANOCORE_ENDPOINT; nanocore's tests run these.

use nanocore_client::{json, Engine, Value};
use std::collections::HashMap;

fn connect() -> Engine {
    let endpoint = std::env::var("NANOCORE_ENDPOINT").expect("NANOCORE_ENDPOINT");
    Engine::connect(&endpoint, 10_000, None).expect("a session")
}

fn control(engine: &mut Engine, operation: &str) -> Value {
    engine
        .control(json!({ "operation": operation }))
        .expect("a reply")
        .0
}

fn stat(engine: &mut Engine, name: &str) -> u64 {
    control(engine, "stats")[name].as_u64().expect("a number")
}

fn greedy(max_tokens: u64) -> Value {
    json!({ "sampling": { "temperature": 0, "max_tokens": max_tokens, "ignore_eos": true } })
}

fn read(engine: &mut Engine, request: &str) -> (Vec<i32>, String) {
    let (mut token_ids, mut finish_reason) = (Vec::new(), String::new());
    while let Some(news) = engine.next(request).expect("the request succeeds") {
        token_ids.extend(news.token_ids);
        finish_reason = news.finish_reason.unwrap_or(finish_reason);
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
    control(&mut engine, "pause"); // so that all run in the same steps
    let requests = prompts.map(|prompt| (prompt, engine.submit(prompt, greedy(12)).expect("sent")));
    control(&mut engine, "resume");
    for (prompt, request) in requests.into_iter().rev() {
        let (token_ids, finish_reason) = read(&mut engine, &request);
        assert_eq!((token_ids.len(), &*finish_reason), (12, "length"));
        assert_eq!(alone[prompt].0, token_ids);
    }
}

#[test]
#[ignore = "needs an engine"]
fn samples_have_seeds_of_their_own_and_log_probabilities() {
    let mut engine = connect();
    let fields = |more: &[(&str, u64)]| {
        let mut sampling = json!({ "temperature": 1, "max_tokens": 6, "ignore_eos": true });
        more.iter()
            .for_each(|(name, value)| sampling[name] = json!(value));
        json!({ "sampling": sampling })
    };
    let prompt = [3, 1, 4, 1, 5, 9];
    let asked = [
        ("seed", 7),
        ("n", 3),
        ("logprobs", 2),
        ("prompt_logprobs", 0),
    ];
    let request = engine.submit(&prompt, fields(&asked)).expect("sent");
    let (mut samples, mut of_prompt) = (vec![vec![]; 3], vec![]);
    while let Some(news) = engine.next(&request).expect("news") {
        assert_eq!(news.logprobs.len(), news.token_ids.len());
        for (entry, token_id) in news.logprobs.iter().zip(&news.token_ids) {
            assert_eq!(
                (entry.candidates.len(), entry.candidates[0].0),
                (3, *token_id)
            );
        }
        of_prompt.extend(
            news.prompt_logprobs
                .iter()
                .map(|entry| entry.candidates[0].0),
        );
        samples[news.index as usize].extend(news.token_ids);
    }
    assert_eq!(of_prompt, prompt[1..]);
    for (seed, sample) in (7..).zip(samples) {
        let alone = engine
            .submit(&prompt, fields(&[("seed", seed)]))
            .expect("sent");
        assert_eq!(read(&mut engine, &alone).0, sample);
    }
}

#[test]
#[ignore = "needs an engine"]
fn structured_outputs_end_and_one_that_is_none_is_refused_alone() {
    let mut engine = connect();
    let schema = json!({ "properties": { "age": { "type": "integr" } } }).to_string();
    let wanted = [
        json!({ "json": schema }),
        json!({ "json": json!({ "enum": ["red", 5] }).to_string() }),
        json!({ "regex": "[ab]{3}" }),
        json!({ "choice": ["yes", "no"] }),
    ];
    let requests = wanted.map(|wanted| {
        let sampling = json!({ "structured_outputs": wanted, "max_tokens": 64 });
        engine
            .submit(&[1, 2, 3], json!({ "sampling": sampling }))
            .expect("sent")
    });
    let refusal = engine.next(&requests[0]).expect_err("no such type");
    assert_eq!(refusal.code, "invalid_request");
    assert!(refusal.message.contains("/properties/age"), "{refusal}");
    for request in &requests[1..] {
        assert_eq!(read(&mut engine, request).1, "stop");
    }
}

#[test]
#[ignore = "needs an engine"]
fn one_aborted_and_one_left_are_both_aborted() {
    let (mut watcher, mut engine) = (connect(), connect());
    let num_waiting = stat(&mut watcher, "num_requests_waiting");
    let num_aborts = stat(&mut watcher, "num_aborts");
    control(&mut watcher, "pause"); // so that neither can end by itself
    let aborted = engine.submit(&[1, 2, 3], greedy(50)).expect("sent");
    engine.submit(&[1, 2, 3], greedy(50)).expect("sent");
    assert_eq!(stat(&mut engine, "num_requests_waiting"), num_waiting + 2);
    engine.abort(&aborted).expect("sent");
    drop(engine);
    while stat(&mut watcher, "num_aborts") < num_aborts + 2 {}
    control(&mut watcher, "resume");
    assert_eq!(stat(&mut watcher, "num_requests_waiting"), num_waiting);
}

#[test]
#[ignore = "needs an engine"]
fn files_are_as_long_as_the_model_card_says() {
    let mut engine = connect();
    let files = engine.welcome["model"]["files"]
        .as_array()
        .expect("files")
        .clone();
    assert!(files.iter().any(|file| file["name"] == "tokenizer.json"));
    for file in files {
        let mut content = Vec::new();
        loop {
            let (name, offset) = (&file["name"], content.len());
            let read = json!({ "operation": "read_file", "file": name, "offset": offset });
            let (_, chunk) = engine.control(read).expect("a chunk");
            if chunk.is_empty() {
                break;
            }
            content.extend(chunk);
        }
        assert_eq!(file["num_bytes"], content.len());
    }
    let read = json!({ "operation": "read_file", "file": "model.safetensors" });
    let refused = engine.control(read).expect_err("no such file");
    assert_eq!(refused.code, "refused");
    stat(&mut engine, "num_steps"); // the session goes on
}
