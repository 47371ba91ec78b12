// Several samples of one prompt, and how likely their tokens were:
// `samples ENDPOINT PROMPT_TOKEN_IDS NUM_SAMPLES SEED`. The last sample is left after its first token.
#include <iostream>
#include <sstream>

#include <nanocore/client.hpp>

int main(int argc, char** argv) try {
    if (argc != 5) {
        std::cerr << "usage: samples ENDPOINT PROMPT_TOKEN_IDS NUM_SAMPLES SEED\n";
        return 2;
    }
    nanocore::TokenIds prompt;
    std::istringstream ids(argv[2]);
    for (std::string id; std::getline(ids, id, ',');) prompt.push_back(std::stoi(id));
    nanocore::Map sampling;
    sampling.put("n", std::stoi(argv[3])).put("seed", std::stoi(argv[4]));
    sampling.put("max_tokens", 6).put("ignore_eos", true).put("logprobs", 2);
    sampling.put("prompt_logprobs", 0);

    nanocore::Engine engine{argv[1]};
    auto streams = engine.submit_samples(prompt, sampling);
    streams.back()->next();
    streams.pop_back();  // nobody keeps it: that aborts this sample alone
    for (const auto& stream : streams) {
        while (const auto tokens = stream->next())
            for (const auto id : *tokens) std::cout << id << " ";
        std::cout << *stream->finish_reason << " " << *stream->seed << " |";
        for (const auto& entry : stream->logprobs)
            std::cout << " " << entry.token_ids[0] << "," << entry.rank << ","
                      << entry.logprobs.size();
        std::cout << " |";
        for (const auto& entry : stream->prompt_logprobs) std::cout << " " << entry.token_ids[0];
        std::cout << std::endl;
    }
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
