// Streams one request: prints each token id as it arrives, then why the request ended.
#include <iostream>
#include <sstream>

#include <nanocore/client.hpp>

int main(int argc, char** argv) try {
    if (argc != 3 && argc != 4) {
        std::cerr << "usage: stream ENDPOINT PROMPT_TOKEN_IDS [MAX_TOKENS]\n";
        return 2;
    }
    nanocore::TokenIds prompt;
    std::istringstream ids(argv[2]);
    for (std::string id; std::getline(ids, id, ',');) prompt.push_back(std::stoi(id));
    nanocore::Map sampling;
    sampling.put("temperature", 0.0).put("max_tokens", argc == 4 ? std::stoi(argv[3]) : 16);

    nanocore::Engine engine{argv[1]};
    const auto stream = engine.submit(prompt, sampling);
    while (const auto tokens = stream->next())
        for (const auto id : *tokens) std::cout << id << std::endl;
    std::cout << "finish_reason: " << *stream->finish_reason << std::endl;
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
