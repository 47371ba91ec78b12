// Checks the library's codec against conformance vectors: `vectors FILE`; exits 1 on a mismatch.
//
// A valid message must unpack to what the vector says, whichever side sends it. What an engine
// sends must pass `decode` if it is valid, and be refused if it is malformed. What a client sends
// must be encoded byte by byte as in the canonical vectors.
#include <fstream>
#include <iostream>
#include <set>

#include <nlohmann/json.hpp>

#include <nanocore/messages.hpp>

using nanocore::Map;
using nlohmann::ordered_json;
using std::string;

namespace {

const std::set<string> bin_fields{"prompt_token_ids", "handles", "tokens", "counts", "data"};

string to_hex(const std::vector<uint8_t>& bytes) {
    string hex;
    for (const int byte : bytes)
        for (const int digit : {byte >> 4, byte & 15}) hex += "0123456789abcdef"[digit];
    return hex;
}
string from_hex(const string& hex) {
    string bytes;
    for (size_t i = 0; i < hex.size(); i += 2)
        bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    return bytes;
}
std::vector<zmq::message_t> to_frames(const ordered_json& vector) {
    std::vector<zmq::message_t> frames;
    for (const auto& hex : vector.at("frames")) frames.emplace_back(from_hex(hex));
    return frames;
}

bool same(const Map& map, const ordered_json& message);

// Reads the field as the type that the vector has it in.
bool same_field(const Map& map, const string& name, const ordered_json& value) {
    if (value.is_null()) return !map.get<std::optional<string>>(name);
    if (bin_fields.count(name)) return to_hex(map.get<nanocore::Column<uint8_t>>(name)) == value;
    if (value.is_string()) return map.get<string>(name) == value;
    if (value.is_boolean()) return map.get<bool>(name) == value;
    if (value.is_number_float()) return map.get<double>(name) == value;
    if (value.is_number_unsigned()) return map.get<uint64_t>(name) == value;
    if (value.is_number_integer()) return map.get<int32_t>(name) == value;
    if (value.is_object()) return same(map.get<Map>(name), value);
    if (value.empty()) return map.get<nanocore::TokenIds>(name).empty();
    if (value[0].is_string()) return map.get<std::vector<string>>(name) == value;
    if (value[0].is_number()) return map.get<nanocore::TokenIds>(name) == value;
    if (value[0].is_array()) return map.get<std::vector<nanocore::Version>>(name) == value;
    const auto maps = map.get<std::vector<Map>>(name);
    return std::equal(maps.begin(), maps.end(), value.begin(), value.end(), same);
}
bool same(const Map& map, const ordered_json& message) {
    for (const auto& [name, value] : message.items())
        if (!same_field(map, name, value)) return false;
    return true;
}

template <class T> void set(std::optional<T>& field, const ordered_json& from, const char* name) {
    if (from.contains(name)) field = from.at(name).get<T>();
}
string pack_submit(const ordered_json& message) {
    const auto bin = from_hex(message.at("prompt_token_ids"));
    nanocore::Submit submit;
    for (size_t i = 0; i < bin.size(); i += 4) {
        uint32_t token_id = 0;
        for (size_t k = 0; k < 4; ++k) token_id |= (bin[i + k] & 255U) << 8 * k;
        submit.prompt_token_ids.push_back(static_cast<int32_t>(token_id));
    }
    submit.request_id = message.at("request_id");
    set(submit.priority, message, "priority");
    set(submit.cache_salt, message, "cache_salt");
    if (message.contains("sampling")) {
        const auto& from = message.at("sampling");
        auto& to = submit.sampling.emplace();
        set(to.temperature, from, "temperature"), set(to.top_p, from, "top_p");
        set(to.top_k, from, "top_k"), set(to.min_p, from, "min_p"), set(to.seed, from, "seed");
        set(to.max_tokens, from, "max_tokens"), set(to.stop_token_ids, from, "stop_token_ids");
        set(to.ignore_eos, from, "ignore_eos");
        set(to.skip_reading_prefix_cache, from, "skip_reading_prefix_cache");
    }
    return nanocore::pack(submit);
}
string pack_other(const ordered_json& message) {
    nanocore::Writer map;
    for (const auto& [name, value] : message.items()) {
        if (value.is_string()) map.put(name.c_str(), value.get<string>());
        else if (value.is_number()) map.put(name.c_str(), value.get<uint64_t>());
        else if (name == "protocol") map.put(name.c_str(), value.get<nanocore::Version>());
        else map.put(name.c_str(), value.get<std::vector<string>>());
    }
    return nanocore::pack(map);
}

// Whether the library writes the fields in this order: that of PROTOCOL.md's tables.
bool in_order(const ordered_json& submit) {
    static const std::vector<string> table{"temperature", "top_p", "top_k", "min_p", "seed",
        "max_tokens", "stop_token_ids", "ignore_eos", "skip_reading_prefix_cache"};
    size_t last = 0;
    const auto sampling = submit.value("sampling", ordered_json::object());
    for (const auto& [name, value] : sampling.items()) {
        const size_t place = std::find(table.begin(), table.end(), name) - table.begin();
        if (place < last) return false;
        last = place;
    }
    return true;
}

bool encodes(nanocore::Op op, const ordered_json& message, const string& body) {
    if (op != nanocore::Op::submit) return pack_other(message) == body;
    if (in_order(message)) return pack_submit(message) == body;
    std::vector<zmq::message_t> frames;
    frames.emplace_back(string("\x10")), frames.emplace_back(pack_submit(message));
    return frames[1].size() == body.size() && same(nanocore::unpack(frames).body, message);
}

bool refused(const std::vector<zmq::message_t>& frames) try {
    nanocore::decode(frames);
    return false;
} catch (const nanocore::ProtocolError&) {
    return true;
}

}  // namespace

int main(int argc, char** argv) try {
    std::ifstream file(argc == 2 ? argv[1] : "");
    if (!file) throw std::runtime_error("usage: vectors FILE, which must exist");
    int num_decoded = 0, num_encoded = 0, num_refused = 0, num_left_out = 0, num_wrong = 0;
    for (string line; std::getline(file, line);) {
        const auto vector = ordered_json::parse(line);
        const auto frames = to_frames(vector);
        const bool by_engine = vector.at("sender") == "engine";
        bool ok = true;
        if (vector.contains("message")) {
            const auto& message = vector.at("message");
            const auto unpacked = by_engine ? nanocore::decode(frames) : nanocore::unpack(frames);
            ok = same(unpacked.body, message);
            ++num_decoded;
            if (!by_engine && vector.value("canonical", false)) {
                ok = ok && encodes(unpacked.op, message, frames[1].to_string());
                ++num_encoded;
            }
        } else if (by_engine) {
            ok = refused(frames);
            ++num_refused;
        } else {
            ++num_left_out;  // how an engine answers a client's mistakes
        }
        if (!ok) {
            std::cout << "wrong: " << vector.at("name").get<string>() << "\n";
            ++num_wrong;
        }
    }
    std::cout << "decoded " << num_decoded << ", encoded " << num_encoded << ", refused "
              << num_refused << ", left out " << num_left_out << ", wrong " << num_wrong << "\n";
    return num_wrong || !num_decoded || !num_encoded || !num_refused ? 1 : 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
