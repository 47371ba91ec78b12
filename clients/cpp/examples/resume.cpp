// Two samples that outlive their engine: kill it, start another one at the endpoint within a minute,
// and they go on. Prints each sample's index and its tokens, one a line, and how each ended.
#include <iostream>
#include <sstream>

#include <nanocore/client.hpp>

nanocore::TokenIds parse(const std::string& text) {
    nanocore::TokenIds prompt;
    std::istringstream ids(text);
    for (std::string id; std::getline(ids, id, ',');) prompt.push_back(std::stoi(id));
    return prompt;
}

int main(int argc, char** argv) try {
    if (argc != 3 && argc != 4) {
        std::cerr << "usage: resume ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]\n";
        return 2;
    }
    nanocore::Map sampling;
    sampling.put("n", 2).put("seed", 7).put("presence_penalty", 0.5).put("ignore_eos", true);
    sampling.put("max_tokens", argc == 4 ? std::stoi(argv[3]) : 1000);

    nanocore::Engine engine{argv[1], {}, std::chrono::minutes(1)};
    const auto streams = engine.submit_samples(parse(argv[2]), sampling);
    std::vector<bool> is_over(streams.size());
    for (size_t num_open = streams.size(); num_open > 0;) {
        engine.poll();
        for (size_t i = 0; i < streams.size(); ++i)
            while (!is_over[i] && streams[i]->ready()) {
                const auto tokens = streams[i]->next();
                for (const auto id : tokens.value_or(nanocore::TokenIds{}))
                    std::cout << i << " " << id << std::endl;
                if (tokens) continue;
                std::cout << i << " finish_reason: " << *streams[i]->finish_reason << std::endl;
                is_over[i] = true;
                --num_open;
            }
    }
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
