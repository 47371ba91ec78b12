// The messages of the nanocore wire protocol 1.3 (PROTOCOL.md): errors, decoding, encoding.
//
// What an engine sends is data: it is checked whole, by type, before anybody reads a field of it,
// and whatever is wrong with it, the answer is a ProtocolError. No sockets in here.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>
#include <msgpack.hpp>
#include <zmq.hpp>

namespace nanocore {
using std::int32_t, std::uint8_t, std::uint32_t, std::uint64_t;
using std::optional, std::string, std::string_view, std::vector, std::shared_ptr;
using TokenIds = vector<int32_t>;
using Version = std::pair<uint32_t, uint32_t>;
enum class Op : uint8_t {
    hello = 0x01, welcome, refused, submit = 0x10, accepted, output, error, abort,
    ping = 0x20, pong, control = 0x30, reply, bye = 0x41,
};

struct Error : std::runtime_error { using runtime_error::runtime_error; };  // base of all
struct ProtocolError : Error { using Error::Error; };  // bytes or a version that break the protocol
struct EngineDead : Error { using Error::Error; };     // the engine said BYE, failed, or is silent
struct EngineError : Error {  // ERROR: of one request or, where it names none, the session's end
    EngineError(const string& code_, const string& message, optional<double> retry = {})
        : Error(code_ + ": " + message), code(code_), retry_after_s(retry) {}
    string code;  // PROTOCOL.md, section 8
    optional<double> retry_after_s;
};
inline void expect(bool ok, string_view what) {
    if (!ok) throw ProtocolError("malformed message: expected " + string(what));
}

inline bool is_utf8(string_view text) {
    for (size_t n = 1; !text.empty(); text.remove_prefix(n)) {
        const int lead = text[0] & 0xFF, next = text.size() > 1 ? text[1] & 0xFF : 0;
        const bool leads = lead < 0x80 || (lead >= 0xC2 && lead <= 0xF4);
        n = !leads ? 0 : lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
        const bool overlong = (lead == 0xE0 && next < 0xA0) || (lead == 0xF0 && next < 0x90);
        const bool no_character = (lead == 0xED && next > 0x9F) || (lead == 0xF4 && next > 0x8F);
        if (n == 0 || n > text.size() || overlong || no_character) return false;
        for (size_t i = 1; i < n; ++i) if ((text[i] & 0xC0) != 0x80) return false;
    }
    return true;
}
template <class T> struct Column : vector<T> { using vector<T>::vector; };  // bin, little endian

/// A map of a message: fields by name and strict type. Fields that nobody asks for do no harm.
class Map {
public:
    explicit Map(shared_ptr<const msgpack::object> map) : map_(std::move(map)) {
        expect(map_->type == msgpack::type::MAP, "a map");
        for (const auto& entry : map_->via.map)
            expect(entry.key.type == msgpack::type::STR, "str keys");
    }
    template <class T> T get(string_view name) const {
        return expect(find(name), name), convert(name, static_cast<T*>(nullptr));
    }
    template <class T> T get(string_view name, T otherwise) const {  // if it is absent
        return find(name) ? get<T>(name) : otherwise;
    }
    template <class T, class... Names> void must(Names... names) const { (get<T>(names), ...); }
    template <class T, class... Names> void may(Names... names) const {
        ((find(names) ? void(get<T>(names)) : void()), ...);
    }

private:
    const msgpack::object* find(string_view name) const {
        const msgpack::object* last = nullptr;  // of a key that occurs twice
        for (const auto& [key, value] : map_->via.map)
            if (string_view(key.via.str.ptr, key.via.str.size) == name) last = &value;
        return last;
    }
    template <class T> T convert(string_view name, T* type) const try {
        return as(*find(name), type);
    } catch (const msgpack::type_error&) {
        throw ProtocolError("malformed message: " + string(name) + " has a wrong type or value");
    }
    template <class T> T as(const msgpack::object& from, T*) const {
        const T to = from.as<T>();  // checks type and range
        if constexpr (std::is_same_v<T, uint64_t>) expect(to >> 53 == 0, "an integer below 2^53");
        return to;
    }
    Map as(const msgpack::object& from, Map*) const { return Map({map_, &from}); }
    string as(const msgpack::object& from, string*) const {
        expect(from.type == msgpack::type::STR, "a str");
        expect(is_utf8({from.via.str.ptr, from.via.str.size}), "UTF-8");
        return {from.via.str.ptr, from.via.str.size};
    }
    template <class T> optional<T> as(const msgpack::object& from, optional<T>*) const {
        return from.is_nil() ? optional<T>() : as(from, static_cast<T*>(nullptr));
    }
    template <class T> vector<T> as(const msgpack::object& from, vector<T>*) const {
        expect(from.type == msgpack::type::ARRAY, "an array");
        vector<T> to;
        for (const auto& element : from.via.array)
            to.push_back(as(element, static_cast<T*>(nullptr)));
        return to;
    }
    template <class T> Column<T> as(const msgpack::object& from, Column<T>*) const {
        const auto& bin = from.via.bin;
        expect(from.type == msgpack::type::BIN && bin.size % sizeof(T) == 0, "a bin column");
        Column<T> to(bin.size / sizeof(T));
        for (size_t i = 0; i < bin.size; ++i)
            to[i / sizeof(T)] |= static_cast<T>((bin.ptr[i] & 0xFFU) << 8 * (i % sizeof(T)));
        return to;
    }
    shared_ptr<const msgpack::object> map_;  // shares the whole body
};
struct Message { Op op; Map body; };

/// The message as it is, of either side. Limits keep a few bytes from claiming gigabytes.
inline Message unpack(const vector<zmq::message_t>& frames) try {
    expect(frames.size() == 2 && frames[0].size() == 1, "an op byte and a body");
    const msgpack::unpack_limit limit(1 << 20, 1 << 10, 1 << 24, 1 << 24, 1 << 24, 16);
    const char* data = frames[1].data<char>();
    size_t end = 0;
    const auto body = std::make_shared<msgpack::object_handle>(
        msgpack::unpack(data, frames[1].size(), end, nullptr, nullptr, limit));
    expect(end == frames[1].size(), "nothing after the body");
    return {Op(*frames[0].data<uint8_t>()), Map({body, &body->get()})};
} catch (const msgpack::unpack_error& error) {
    throw ProtocolError(string("malformed message: ") + error.what());
}

/// A message of an engine, checked whole against the tables of PROTOCOL.md. Throws ProtocolError.
inline Message decode(const vector<zmq::message_t>& frames) {
    using Int = uint64_t;
    using Text = optional<string>;
    const auto message = unpack(frames);
    const auto& body = message.body;
    switch (message.op) {
    case Op::welcome: {
        body.must<Version>("protocol"), body.must<string>("session", "engine_instance");
        body.may<vector<string>>("capabilities");
        const auto model = body.get<Map>("model"), limits = body.get<Map>("limits");
        model.must<string>("model", "architecture", "dtype"), model.must<TokenIds>("eos_token_ids");
        model.must<Int>("vocab_size", "max_model_len", "block_size", "num_blocks");
        model.may<Map>("default_sampling");
        for (const auto& file : model.get<vector<Map>>("files", {}))
            file.must<string>("name", "sha256"), file.must<Int>("num_bytes");
        limits.must<Int>("max_frame_bytes", "max_num_seqs");
        limits.must<Int>("ping_interval_ms", "session_timeout_ms");
        limits.may<Int>("max_request_id_chars", "max_cache_salt_chars", "max_file_chunk_bytes");
        limits.may<optional<Int>>("max_num_queued_reqs", "max_num_queued_tokens");
        break;
    }
    case Op::refused: body.must<string>("message"), body.must<vector<Version>>("supported"); break;
    case Op::accepted:
        body.must<string>("request_id"), body.must<uint32_t>("handle"), body.must<Int>("seed");
        break;
    case Op::output: {
        const auto handles = body.get<Column<uint32_t>>("handles", {});
        const Column<uint32_t> ones(handles.size(), 1);
        const auto counts = body.get<optional<Column<uint32_t>>>("counts", {}).value_or(ones);
        const auto num_tokens = body.get<Column<int32_t>>("tokens", {}).size();
        expect(counts.size() == handles.size(), "a count for each handle");
        expect(std::accumulate(counts.begin(), counts.end(), Int{0}) == num_tokens, "right counts");
        for (const auto& event : body.get<vector<Map>>("events", {})) {
            event.must<uint32_t>("handle"), event.may<Text>("message");
            event.may<optional<Int>>("num_cached_tokens", "stop_reason");
            const auto reason = event.get<Text>("finish_reason", {}).value_or("stop");
            expect(reason == "stop" || reason == "length" || reason == "abort" || reason == "error",
                   "a finish_reason");
        }
        break;
    }
    case Op::error:
        body.must<string>("code", "message"), body.may<Text>("request_id");
        body.may<optional<double>>("retry_after_s");
        break;
    case Op::ping: body.may<Int>("nonce"); break;
    case Op::pong: body.may<Int>("nonce"), body.may<optional<Int>>("num_steps"); break;
    case Op::reply:
        body.must<Int>("call_id"), body.may<bool>("ok"), body.may<Text>("message");
        body.may<optional<Column<char>>>("data");
        if (const auto stats = body.get<optional<Map>>("stats", {})) {
            stats->must<Int>("num_requests_running", "num_requests_waiting", "num_blocks",
                "num_steps", "num_free_blocks", "prefix_cache_queries", "prefix_cache_hits",
                "num_preemptions", "num_aborts", "prompt_tokens", "generation_tokens");
            stats->must<double>("kv_cache_usage_perc"), stats->must<bool>("paused");
            stats->may<double>("prefix_cache_hit_rate");
            stats->may<Int>("num_clients", "num_protocol_errors");
        }
        break;
    case Op::bye: body.may<string>("reason"); break;
    default: throw ProtocolError("unknown op " + std::to_string(static_cast<int>(message.op)));
    }
    return message;
}

/// Writes a map, in the order of the calls. What is nullopt is left out.
class Writer {
public:
    template <class T> Writer& put(const char* name, const T& value) {
        ++size_, packer_.pack(name);
        if constexpr (std::is_same_v<T, string>) {
            if (!is_utf8(value)) throw Error(string(name) + " is not UTF-8");
        }
        if constexpr (std::is_same_v<T, double>) {  // packer_ would make an integer of 1.0
            uint64_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            string bytes = "\xcb";
            for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(bits >> shift);
            buffer_.write(bytes.data(), bytes.size());
        } else packer_.pack(value);
        return *this;
    }
    template <class T> Writer& put(const char* name, const optional<T>& value) {
        return value ? put(name, *value) : *this;
    }
    template <class Packer> void msgpack_pack(Packer& packer) const {
        packer.pack_map(size_).pack_str_body(buffer_.data(), static_cast<uint32_t>(buffer_.size()));
    }

private:
    uint32_t size_ = 0;
    msgpack::sbuffer buffer_;
    msgpack::packer<msgpack::sbuffer> packer_{buffer_};
};
struct Sampling {  // PROTOCOL.md, section 7; what is not set has its default
    optional<double> temperature, top_p, min_p;
    optional<int32_t> top_k;
    optional<uint64_t> seed, max_tokens;
    optional<TokenIds> stop_token_ids;
    optional<bool> ignore_eos, skip_reading_prefix_cache;
    template <class Packer> void msgpack_pack(Packer& packer) const {
        Writer map;
        map.put("temperature", temperature).put("top_p", top_p).put("top_k", top_k);
        map.put("min_p", min_p).put("seed", seed).put("max_tokens", max_tokens);
        map.put("stop_token_ids", stop_token_ids).put("ignore_eos", ignore_eos);
        packer.pack(map.put("skip_reading_prefix_cache", skip_reading_prefix_cache));
    }
};
struct Submit {
    TokenIds prompt_token_ids;
    optional<Sampling> sampling{};  // nullopt: the model card's default_sampling
    string request_id{};            // "": the client chooses one
    optional<int32_t> priority{};
    optional<string> cache_salt{};
    template <class Packer> void msgpack_pack(Packer& packer) const {
        vector<char> bin;
        for (const auto token_id : prompt_token_ids)
            for (int shift = 0; shift < 32; shift += 8)
                bin.push_back(static_cast<char>(static_cast<uint32_t>(token_id) >> shift));
        Writer map;
        map.put("request_id", request_id).put("prompt_token_ids", bin).put("sampling", sampling);
        packer.pack(map.put("priority", priority).put("cache_salt", cache_salt));
    }
};
template <class T> string pack(const T& map) {
    msgpack::sbuffer body;
    return msgpack::pack(body, map), string(body.data(), body.size());
}

}  // namespace nanocore
