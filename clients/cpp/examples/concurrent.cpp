// Several requests at once on one session; then one that is left early, the model card and a file.
#include <iostream>
#include <sstream>

#include <nanocore/client.hpp>

int main(int argc, char** argv) try {
    if (argc != 4) {
        std::cerr << "usage: concurrent ENDPOINT PROMPT_TOKEN_IDS NUM_REQUESTS\n";
        return 2;
    }
    nanocore::TokenIds prompt;
    std::istringstream ids(argv[2]);
    for (std::string id; std::getline(ids, id, ',');) prompt.push_back(std::stoi(id));
    nanocore::Map sampling, endless;
    sampling.put("temperature", 0.0).put("max_tokens", 32);
    endless.put("temperature", 0.0).put("ignore_eos", true);

    nanocore::Engine engine{argv[1]};
    const auto stats = [&] { return engine.control("stats").get<nanocore::Map>("stats"); };
    std::vector<std::shared_ptr<nanocore::Engine::Stream>> streams;
    for (int i = std::stoi(argv[3]); i > 0; --i) streams.push_back(engine.submit(prompt, sampling));
    for (const auto& stream : streams) {  // whichever waits, tokens go to all
        std::cout << stream->request_id << ":";
        while (const auto tokens = stream->next())
            for (const auto id : *tokens) std::cout << " " << id;
        std::cout << std::endl;
    }

    engine.submit(prompt, endless)->next();  // nobody keeps the Stream: that aborts the request
    while (stats().get<int>("num_requests_running") > 0) engine.poll(std::chrono::milliseconds(10));
    std::cout << "num_aborts: " << stats().get<int>("num_aborts") << std::endl;

    const auto model = engine.welcome().get<nanocore::Map>("model");
    std::cout << "max_model_len: " << model.get<int>("max_model_len") << std::endl;
    for (const auto& file : model.get<std::vector<nanocore::Map>>("files", {})) {
        const auto name = file.get<std::string>("name");
        std::cout << name << ": " << engine.read_file(name).size() << std::endl;
    }
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
