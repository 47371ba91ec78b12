// Several requests at once on one session; then one that is left early, the model card and a file.
#include <iostream>
#include <sstream>

#include <nanocore/client.hpp>

int main(int argc, char** argv) try {
    if (argc != 4) {
        std::cerr << "usage: concurrent ENDPOINT PROMPT_TOKEN_IDS NUM_REQUESTS\n";
        return 2;
    }
    nanocore::Submit request;
    std::istringstream ids(argv[2]);
    for (std::string id; std::getline(ids, id, ',');)
        request.prompt_token_ids.push_back(std::stoi(id));
    request.sampling.emplace().temperature = 0.0;
    request.sampling->max_tokens = 32;

    nanocore::Engine engine{argv[1]};
    std::vector<nanocore::Stream> streams;
    for (int i = std::stoi(argv[3]); i > 0; --i) streams.push_back(engine.submit(request));
    for (auto& stream : streams) {  // whichever waits, tokens go to all
        std::cout << stream->id << ":";
        while (const auto tokens = stream.next())
            for (const auto id : *tokens) std::cout << " " << id;
        std::cout << std::endl;
    }

    request.sampling->ignore_eos = true;
    request.sampling->max_tokens.reset();
    {
        auto stream = engine.submit(request);
        stream.next();
    }  // going out of scope aborts it
    while (engine.stats().get<uint64_t>("num_requests_running") > 0)
        engine.poll(std::chrono::milliseconds(10));
    std::cout << "num_aborts: " << engine.stats().get<uint64_t>("num_aborts") << std::endl;

    const auto model = engine.welcome().get<nanocore::Map>("model");
    std::cout << "max_model_len: " << model.get<uint64_t>("max_model_len") << std::endl;
    for (const auto& file : model.get<std::vector<nanocore::Map>>("files", {})) {
        const auto name = file.get<std::string>("name");
        std::cout << name << ": " << engine.read_file(name).size() << std::endl;
    }
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
