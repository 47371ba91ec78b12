// Several requests whose outputs must be something, each refused alone if its schema is none:
// `structured ENDPOINT PROMPT_TOKEN_IDS (json|regex|choice TEXT)...`; of choice one of TEXT,TEXT,...
#include <iostream>
#include <sstream>

#include <nanocore/client.hpp>

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
    return parts;
}

int main(int argc, char** argv) try {
    if (argc < 5 || argc % 2 == 0) {
        std::cerr << "usage: structured ENDPOINT PROMPT_TOKEN_IDS (json|regex|choice TEXT)...\n";
        return 2;
    }
    nanocore::TokenIds prompt;
    for (const auto& id : split(argv[2])) prompt.push_back(std::stoi(id));
    nanocore::Engine engine{argv[1]};
    std::vector<std::shared_ptr<nanocore::Engine::Stream>> streams;
    for (int i = 3; i < argc; i += 2) {
        const std::string kind = argv[i], text = argv[i + 1];
        nanocore::Map wanted, sampling;  // a schema is sent as its text
        kind == "choice" ? wanted.put(kind, split(text)) : wanted.put(kind, text);
        sampling.put("structured_outputs", wanted).put("max_tokens", 64);
        streams.push_back(engine.submit(prompt, sampling));
    }
    for (const auto& stream : streams) try {
            while (const auto tokens = stream->next())
                for (const auto id : *tokens) std::cout << id << " ";
            std::cout << *stream->finish_reason << std::endl;
        } catch (const nanocore::EngineError& error) {  // of this request alone
            std::cout << error.what() << std::endl;
        }
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
