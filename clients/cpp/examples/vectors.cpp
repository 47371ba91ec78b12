// Checks the client against conformance vectors: `vectors FILE`; exits 1 on a mismatch.
//
// What clients send: the library's Map must pack it byte by byte as in the canonical vectors. What
// engines send is sent to an Engine, by an engine that is only played: a malformed message must end
// the session with a ProtocolError, a valid one must not, and arrive as the vector says.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>
#include <thread>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include <nanocore/client.hpp>

using nanocore::Bin, nanocore::Map, nanocore::TokenIds;
using nlohmann::ordered_json;
using std::string, std::vector;

namespace {

const std::set<string> bin_fields{"prompt_token_ids", "output_token_ids", "handles", "tokens",
                                  "counts",           "data",             "embedding"};

// Beside these, whatever stands in a map of log probabilities is a bin; metrics' counts are none.
bool is_bin(const string& name, const ordered_json& value) {
    static const std::set<string> columns{"ranks", "token_ids", "logprobs"};
    return value.is_string() && (bin_fields.count(name) || columns.count(name));
}

string from_hex(const string& hex) {
    string bytes;
    for (size_t i = 0; i < hex.size(); i += 2)
        bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    return bytes;
}
vector<string> frames_of(const ordered_json& vector) {
    std::vector<string> frames;
    for (const auto& hex : vector.at("frames")) frames.push_back(from_hex(hex));
    return frames;
}
template <class T>
string pack(const T& map) {
    msgpack::sbuffer body;
    msgpack::pack(body, map);
    return string(body.data(), body.size());
}
Map unpack(const string& body) {
    return msgpack::unpack(body.data(), body.size())->as<Map>();
}

// The vector's message as a Map, in its order.
Map to_map(const ordered_json& message) {
    Map map;
    for (const auto& [name, value] : message.items()) {
        if (is_bin(name, value)) {
            const auto bytes = from_hex(value);
            map.put(name, vector<char>(bytes.begin(), bytes.end()));
        } else if (value.is_object())
            map.put(name, to_map(value));
        else if (value.is_string())
            map.put(name, value.get<string>());
        else if (value.is_boolean())
            map.put(name, value.get<bool>());
        else if (value.is_number_float())
            map.put(name, value.get<double>());
        else if (value.is_number_unsigned())
            map.put(name, value.get<uint64_t>());
        else if (value.is_number_integer())
            map.put(name, value.get<int64_t>());
        else if (!value.empty() && value[0].is_string())
            map.put(name, value.get<vector<string>>());
        else if (!value.empty() && value[0].is_object()) {
            vector<Map> maps;
            for (const auto& inner : value) maps.push_back(to_map(inner));
            map.put(name, maps);
        } else if (name == "logit_bias")
            map.put(name, value.get<vector<std::pair<int64_t, double>>>());
        else if (!value.empty() && value[0].is_array())
            map.put(name, value.get<vector<vector<int64_t>>>());
        else
            map.put(name, value.get<vector<int64_t>>());
    }
    return map;
}

// Whether the map says what the message says; each field is read as the type that it has there.
bool same(const Map& map, const ordered_json& message);
bool same_field(const Map& map, const string& name, const ordered_json& value) {
    if (value.is_null()) return !map.get<std::optional<string>>(name, {});
    if (is_bin(name, value)) {
        const auto bin = map.get<Bin>(name);
        return string(bin.ptr, bin.size) == from_hex(value);
    }
    if (value.is_string()) return map.get<string>(name) == value;
    if (value.is_boolean()) return map.get<bool>(name) == value;
    if (value.is_number_float()) return map.get<double>(name) == value;
    if (value.is_number_unsigned()) return map.get<uint64_t>(name) == value;
    if (value.is_number_integer()) return map.get<int64_t>(name) == value;
    if (value.is_object()) return same(map.get<Map>(name), value);
    if (value.empty()) return map.get<TokenIds>(name).empty();
    if (value[0].is_string()) return map.get<vector<string>>(name) == value;
    if (value[0].is_number_float()) return map.get<vector<double>>(name) == value;
    if (value[0].is_number()) return map.get<vector<int64_t>>(name) == value;
    if (name == "logit_bias") {
        const auto pairs = value.get<vector<std::pair<int64_t, double>>>();
        return map.get<vector<std::pair<int64_t, double>>>(name) == pairs;
    }
    if (name == "way") {
        const auto moves = value.get<vector<std::pair<string, double>>>();
        return map.get<vector<std::pair<string, double>>>(name) == moves;
    }
    if (name == "labels") return map.get<vector<vector<string>>>(name) == value;
    if (value[0].is_array()) return map.get<vector<vector<int64_t>>>(name) == value;
    const auto maps = map.get<vector<Map>>(name);
    return std::equal(maps.begin(), maps.end(), value.begin(), value.end(), same);
}
bool same(const Map& map, const ordered_json& message) {
    for (const auto& [name, value] : message.items())
        if (!same_field(map, name, value)) return false;
    return true;
}

// Plays an engine, in a thread of its own, to one Engine after the other. `next` comes in place of
// WELCOME if it is one (or REFUSED), otherwise after ACCEPTED; then the request ends.
class PlayedEngine {
public:
    explicit PlayedEngine(vector<string> welcome)
        : endpoint("ipc://" +
                   (std::filesystem::temp_directory_path() / "nanocore-vectors-").string() +
                   std::to_string(getpid())),
          welcome_(std::move(welcome)) {
        socket_.set(zmq::sockopt::rcvtimeo, 20);
        socket_.set(zmq::sockopt::linger, 0);
        socket_.bind(endpoint);
        thread_ = std::thread([this] { play(); });
    }
    ~PlayedEngine() { stopped_ = true, thread_.join(); }
    void next(vector<string> frames, uint32_t handle) {
        const std::lock_guard lock(mutex_);
        next_ = std::move(frames), handle_ = handle;
    }
    const string endpoint;

private:
    void play() {
        while (!stopped_) {
            zmq::multipart_t message;
            if (!message.recv(socket_)) continue;
            const std::lock_guard lock(mutex_);
            const auto peer = message[0].to_string(), op = message[1].to_string();
            const bool opens = next_[0] == "\x02" || next_[0] == "\x03";
            if (op == "\x01") send(peer, opens ? next_ : welcome_);
            if (op != "\x10") continue;
            const auto id = unpack(message[2].to_string()).get<string>("request_id");
            send(peer,
                 {"\x11", pack(Map().put("request_id", id).put("handle", handle_).put("seed", 1))});
            if (!opens) send(peer, next_);
            const auto end = Map().put("handle", handle_).put("finish_reason", string("stop"));
            send(peer, {"\x12", pack(Map().put("events", vector<Map>{end}))});
        }
    }
    void send(const string& peer, const vector<string>& frames) {
        zmq::multipart_t message(peer.data(), peer.size());
        for (const auto& frame : frames) message.addstr(frame);
        message.send(socket_);
    }

    zmq::context_t context_;
    zmq::socket_t socket_{context_, zmq::socket_type::router};
    const vector<string> welcome_;
    std::mutex mutex_;
    vector<string> next_;
    uint32_t handle_ = 0;
    std::atomic<bool> stopped_{false};
    std::thread thread_;
};

// Opens a session and waits for one request, with the vector in between.
enum class Outcome { passed, refused, ended, wrong };
Outcome play(PlayedEngine& played, const ordered_json& vector) try {
    const auto frames = frames_of(vector);
    const auto message = vector.value("message", ordered_json::object());
    ordered_json bins;
    for (const auto& name : {"handles", "tokens", "counts"})
        if (message.contains(name) && !message[name].is_null()) bins[name] = message[name];
    const auto columns = to_map(bins);
    const auto handles = nanocore::column<uint32_t>(columns, "handles");
    const auto handle = handles.empty() ? 4'000'000'000 : handles.back();
    played.next(frames, handle);
    nanocore::Engine engine{played.endpoint};
    if (frames[0] == "\x02" && !same(engine.welcome(), message)) return Outcome::wrong;
    const auto stream = engine.submit({1, 2, 3});
    TokenIds arrived;
    while (const auto tokens = stream->next())
        arrived.insert(arrived.end(), tokens->begin(), tokens->end());
    if (handles.empty()) return arrived.empty() ? Outcome::passed : Outcome::wrong;
    const auto tokens = nanocore::column<int32_t>(columns, "tokens");
    const auto counts = nanocore::column<uint32_t>(columns, "counts", {1});
    const TokenIds expected(tokens.end() - counts.back(), tokens.end());
    return arrived == expected ? Outcome::passed : Outcome::wrong;
} catch (const nanocore::ProtocolError& error) {
    const bool malformed = string(error.what()).rfind("malformed message: ", 0) == 0;
    return malformed ? Outcome::refused : Outcome::ended;  // not protocol 1, or REFUSED
} catch (const nanocore::Error&) {                         // ERROR, BYE
    return Outcome::ended;
}

// What a valid message of an engine must come to.
bool may_end_a_session(const ordered_json& vector) {
    const auto op = from_hex(vector.at("frames")[0]);
    if (op == "\x02") return vector.at("message").at("protocol")[0] != 1;
    if (op != "\x13") return op == "\x03" || op == "\x41";
    const auto& error = vector.at("message");
    return !error.contains("request_id") || error["request_id"].is_null() ||
           error["code"] == "engine_dead" || error["code"] == "no_session";
}

}  // namespace

int main(int argc, char** argv) try {
    std::ifstream file(argc == 2 ? argv[1] : "");
    if (!file) throw std::runtime_error("usage: vectors FILE, which must exist");
    vector<ordered_json> vectors;
    for (string line; std::getline(file, line);) vectors.push_back(ordered_json::parse(line));
    const auto plain = ordered_json{{"protocol", {1, 5}}};
    PlayedEngine played({"\x02", pack(to_map(plain))});
    int num_decoded = 0, num_encoded = 0, num_refused = 0, num_lenient = 0, num_left_out = 0,
        num_wrong = 0;
    for (const auto& vector : vectors) {
        const auto frames = frames_of(vector);
        const bool by_engine = vector.at("sender") == "engine", valid = vector.contains("message");
        bool ok = true;
        if (valid) {
            ++num_decoded;
            ok = same(unpack(frames[1]), vector.at("message"));
            if (vector.value("canonical", false) && !by_engine) {
                ++num_encoded;
                ok = ok && pack(to_map(vector.at("message"))) == frames[1];
            }
            if (by_engine) {
                const auto outcome = play(played, vector);
                ok =
                    ok && outcome == (may_end_a_session(vector) ? Outcome::ended : Outcome::passed);
            }
        } else if (by_engine) {
            const auto outcome = play(played, vector);
            const bool strict = vector.value("strict", false);
            ok = strict || outcome == Outcome::refused;
            ++(outcome == Outcome::refused ? num_refused : num_lenient);
        } else {
            ++num_left_out;  // how an engine answers a client's mistakes
        }
        if (!ok) {
            std::cout << "wrong: " << vector.at("name").get<string>() << "\n";
            ++num_wrong;
        }
    }
    std::cout << "decoded " << num_decoded << ", encoded " << num_encoded << ", refused "
              << num_refused << ", taken although marked strict " << num_lenient << ", left out "
              << num_left_out << ", wrong " << num_wrong << "\n";
    return num_wrong || !num_decoded || !num_encoded || !num_refused ? 1 : 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
