// A client of nanocore engines (PROTOCOL.md 1.14) on cppzmq and msgpack-c. An Engine is a session.
// It and its Streams, which must go first, belong to one thread: whoever waits takes in what
// arrives for all and answers PINGs. A program that waits for nothing calls Engine::poll, or the
// engine ends the session after 30 s.
#pragma once
#include <chrono>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <msgpack.hpp>
#include <zmq_addon.hpp>

namespace nanocore {
using std::chrono::milliseconds, std::chrono::steady_clock, std::optional, std::string, std::vector;
using TokenIds = vector<int32_t>;
using Bin = msgpack::type::raw_ref;

enum class Op : unsigned char {
    hello = 0x01,
    welcome = 0x02,
    refused = 0x03,
    submit = 0x10,
    accepted = 0x11,
    output = 0x12,
    error = 0x13,
    abort = 0x14,
    ping = 0x20,
    pong = 0x21,
    control = 0x30,
    reply = 0x31,
    draining = 0x40,
    bye = 0x41,
};

/// The base of the others.
struct Error : std::runtime_error {
    using runtime_error::runtime_error;
};
/// A malformed message.
struct ProtocolError : Error {
    using Error::Error;
};
/// The engine said so, said BYE, or says nothing.
struct EngineDead : Error {
    using Error::Error;
};
/// ERROR, usually of one request, or REFUSED.
struct EngineError : Error {
    string code;  // PROTOCOL.md, section 12, or "refused"
    optional<double> retry_after_s;
    EngineError(const string& text, const string& code_, optional<double> retry_after_s_)
        : Error(text), code(code_), retry_after_s(retry_after_s_) {}
};

/// A map that is sent, in the order of `put`, or was received. The functions msgpack_* are for
/// msgpack-c.
struct Map {
    template <class T>
    Map& put(const string& name, const T& value) {
        // Twice, because the first only refers to bytes, which may not live as long as this.
        fields_.emplace_back(name, msgpack::object(msgpack::object(value, *memory_), *memory_));
        return *this;
    }
    template <class T>
    Map& put(const string& name, const optional<T>& value) {  // nullopt is left out
        return value ? put(name, *value) : *this;
    }
    Map& drop(const string& name) {
        const auto is_named = [&](const auto& field) { return field.first == name; };
        fields_.erase(std::remove_if(fields_.begin(), fields_.end(), is_named), fields_.end());
        return *this;
    }
    bool has(const string& name) const { return !find(name).is_nil(); }
    template <class T>
    T get(const string& name) const try {
        return find(name).as<T>();
    } catch (const msgpack::type_error&) {
        throw ProtocolError("malformed message: " + name + " is missing or has a wrong type");
    }
    template <class T>
    T get(const string& name, T otherwise) const {  // if it is missing, or nil
        return find(name).is_nil() ? otherwise : get<T>(name);
    }
    void msgpack_unpack(const msgpack::object& map) {
        msgpack::object(map, *memory_).convert(fields_);
    }
    void msgpack_object(msgpack::object* map, msgpack::zone& zone) const { *map = {fields_, zone}; }
    template <class Packer>
    void msgpack_pack(Packer& packer) const {
        packer.pack(fields_);
    }

private:
    msgpack::object find(const string& name) const {  // nil if it is missing; the last one counts
        msgpack::object value;
        for (const auto& field : fields_)
            if (field.first == name) value = field.second;
        return value;
    }
    std::shared_ptr<msgpack::zone> memory_ = std::make_shared<msgpack::zone>();
    msgpack::type::assoc_vector<string, msgpack::object> fields_;
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "columns are copied as they are");
/// The integers of a column, or `otherwise` if there is none.
template <class T>
vector<T> column(const Map& map, const string& name, const vector<T>& otherwise = {}) {
    const auto bin = map.get<optional<Bin>>(name, {});
    if (!bin) return otherwise;
    if (bin->size % 4 != 0) throw ProtocolError("malformed message: " + name + " is cut");
    vector<T> integers(bin->size / 4);
    std::copy_n(bin->ptr, bin->size, reinterpret_cast<char*>(integers.data()));
    return integers;
}

/// Of one token: its rank, 1 being the most likely, and ids and log probabilities of candidates:
/// the token itself, then the most likely ones.
struct TokenLogprobs {
    uint32_t rank;
    TokenIds token_ids;
    vector<float> logprobs;
};
/// Entries of the columns in the field `name` of an OUTPUT, each with its handle.
inline vector<std::pair<uint32_t, TokenLogprobs>> entries(const Map& output, const string& name) {
    const auto columns = output.get(name, Map());
    const auto handles = column<uint32_t>(columns, "handles"),
               ranks = column<uint32_t>(columns, "ranks"),
               counts = column<uint32_t>(columns, "counts");
    const auto ids = column<int32_t>(columns, "token_ids");
    const auto logprobs = column<float>(columns, "logprobs");
    const auto num_candidates = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
    if (ranks.size() != handles.size() || counts.size() != handles.size() ||
        ids.size() != num_candidates || logprobs.size() != num_candidates)
        throw ProtocolError("malformed message: log probabilities do not fit together");
    vector<std::pair<uint32_t, TokenLogprobs>> result;
    auto id = ids.begin();
    auto logprob = logprobs.begin();
    for (size_t i = 0; i < handles.size(); id += counts[i], logprob += counts[i++]) {
        if (!counts[i]) throw ProtocolError("malformed message: a token without log probability");
        result.emplace_back(handles[i], TokenLogprobs{ranks[i], {id, id + counts[i]},
                                                      {logprob, logprob + counts[i]}});
    }
    return result;
}

/// Z85, of 40 characters each.
struct CurveKeys {
    string server_public, client_public, client_secret;
};
/// Sampling parameters that older engines refuse, and the minor version that brought them.
constexpr std::pair<const char*, int> new_parameters[]{
    {"pooling", 7},           {"structured_outputs", 6}, {"n", 5},
    {"min_tokens", 5},        {"presence_penalty", 5},   {"frequency_penalty", 5},
    {"logit_bias", 5},        {"repetition_penalty", 5}, {"logprobs", 5},
    {"prompt_logprobs", 5},   {"allowed_token_ids", 5},  {"bad_words_token_ids", 5},
    {"repetition_detection", 14},
};
/// How often in a row a stream may be lost without a token: it may be what ends engines.
constexpr int max_lost = 3;
class Engine {
public:
    /// The output of a sample of a request, which is aborted if its Stream goes before it has ended.
    struct Stream {
        string request_id;    // another one after each engine that it outlives
        TokenIds token_ids;   // all so far
        vector<float> embedding;  // with `pooling`
        optional<uint64_t> seed, num_cached_tokens, stop_reason;  // once the engine has told them
        optional<string> finish_reason, stop_cause, message;
        vector<TokenLogprobs> logprobs, prompt_logprobs;  // of all tokens so far, if asked for
        explicit Stream(Engine& engine) : engine_(engine) {}
        Stream(const Stream&) = delete;
        ~Stream() {
            if (finish_reason || error_) return;
            if (handle_)
                engine_.abort_sample(*handle_);
            else if (!is_one_of_several_)  // others are aborted when they are accepted
                engine_.try_send(Op::abort, Map().put("request_ids", vector<string>{request_id}));
        }
        /// Whether `next` would not wait.
        bool ready() const { return finish_reason || error_ || !unread_.empty(); }
        /// Waits for tokens: one or more, or nullopt after the last. Throws if the request has
        /// failed.
        optional<TokenIds> next() {
            while (!ready()) engine_.poll();
            if (!unread_.empty()) return std::exchange(unread_, {});
            return error_ ? throw *error_ : std::nullopt;
        }

    private:
        friend class Engine;
        Engine& engine_;
        optional<EngineError> error_;
        TokenIds unread_;
        bool is_one_of_several_ = false;
        optional<uint32_t> handle_;  // of one of several samples
        Map submit_;
        optional<steady_clock::time_point> deadline_;
        bool is_first_ = true;
        int num_lost_ = 0;
    };
    /// Opens a session; tcp:// needs keys. Streams outlive their engine if another one serves the
    /// endpoint within `resume`: they go on with it.
    explicit Engine(const string& endpoint, const optional<CurveKeys>& keys = {},
                    milliseconds resume = milliseconds(0))
        : endpoint_(endpoint), keys_(keys), resume_(resume) {
        if (!keys && endpoint.rfind("tcp://", 0) == 0)
            throw Error("tcp:// needs keys: anybody could answer");
        open();
    }
    ~Engine() {
        try_send(Op::bye, Map(), ZMQ_DONTWAIT);
    }
    const Map& welcome() const { return *welcome_; }
    /// `sampling`: PROTOCOL.md, section 9; without it the model card's default_sampling counts.
    std::shared_ptr<Stream> submit(const TokenIds& prompt_token_ids,
                                   const optional<Map>& sampling = {},
                                   optional<int32_t> priority = {},
                                   optional<string> cache_salt = {},
                                   optional<double> timeout_s = {}) {
        return submit_samples(prompt_token_ids, sampling, priority, cache_salt, timeout_s).front();
    }
    /// Likewise, of a request with `n` in `sampling`: a Stream for each sample.
    vector<std::shared_ptr<Stream>> submit_samples(const TokenIds& prompt_token_ids,
                                                   const optional<Map>& sampling = {},
                                                   optional<int32_t> priority = {},
                                                   optional<string> cache_salt = {},
                                                   optional<double> timeout_s = {}) {
        for (const auto& [name, since] : new_parameters)
            if (sampling && minor() < since && sampling->has(name))
                throw Error(name + (" needs protocol 1." + std::to_string(since)));
        if (timeout_s && minor() < 9) throw Error("timeout_s needs protocol 1.9");
        const auto body = Map()
                              .put("prompt_token_ids", bin(prompt_token_ids))
                              .put("sampling", sampling)
                              .put("priority", priority)
                              .put("cache_salt", cache_salt)
                              .put("timeout_s", timeout_s);
        vector<std::shared_ptr<Stream>> streams(sampling ? sampling->get("n", 1) : 1);
        for (auto& stream : streams) {
            stream = std::make_shared<Stream>(*this);
            stream->submit_ = body;
            stream->is_first_ = stream == streams.front();
            if (timeout_s)
                stream->deadline_ = steady_clock::now() + milliseconds(int64_t(1e3 * *timeout_s));
        }
        request({streams.begin(), streams.end()}, body);
        return streams;
    }
    /// The REPLY to an operation. Throws Error if it was not done.
    Map control(const string& operation, optional<string> file = {},
                optional<uint64_t> offset = {}) {
        send(Op::control, Map()
                              .put("call_id", ++call_id_)
                              .put("operation", operation)
                              .put("file", file)
                              .put("offset", offset));
        const auto num_sessions = num_sessions_;
        for (reply_.reset(); !reply_;) {
            poll();
            if (num_sessions != num_sessions_) throw EngineDead(operation + ": the session ended");
        }
        if (!reply_->get("ok", true))
            throw Error(operation + ": " + reply_->get<string>("message", ""));
        return *reply_;
    }
    /// One of the files in the model card. Its sha256 is there for the caller to compare.
    string read_file(const string& name) {
        for (string content;;) {
            const auto chunk = control("read_file", name, content.size()).get<string>("data");
            if (chunk.empty()) return content;
            if ((content += chunk).size() > 64 << 20)
                throw ProtocolError(name + " has more than 64 MiB");
        }
    }
    /// Takes in a message if one comes in time, and says if so. An Error thrown here ends the
    /// session.
    bool poll(milliseconds timeout = milliseconds(1000)) {
        if (failure_) std::rethrow_exception(failure_);
        try {
            return take_in(timeout);
        } catch (const EngineDead&) {
            if (resume_.count() == 0) throw;
        }
        go_on();
        return true;
    }

private:
    using Samples = vector<std::weak_ptr<Stream>>;  // of one SUBMIT
    int minor() const { return welcome_->get<std::pair<int, int>>("protocol").second; }
    static Bin bin(const TokenIds& ids) {
        return Bin(reinterpret_cast<const char*>(ids.data()), 4 * ids.size());
    }
    void open() {
        socket_ = zmq::socket_t{context_, zmq::socket_type::dealer};
        if (keys_) {
            socket_.set(zmq::sockopt::curve_serverkey, keys_->server_public);
            socket_.set(zmq::sockopt::curve_publickey, keys_->client_public);
            socket_.set(zmq::sockopt::curve_secretkey, keys_->client_secret);
        }
        socket_.set(zmq::sockopt::maxmsgsize, int64_t{16} << 20);
        socket_.set(zmq::sockopt::sndtimeo, 10'000);
        socket_.set(zmq::sockopt::linger, 200);  // an ABORT or BYE just sent still leaves
        const auto watch = "inproc://" + std::to_string(++num_sessions_);
        zmq_socket_monitor(socket_.handle(), watch.c_str(), ZMQ_EVENT_DISCONNECTED);
        watch_ = zmq::socket_t{context_, zmq::socket_type::pair};
        watch_.connect(watch);
        socket_.connect(endpoint_);
        failure_ = nullptr;
        heard_ = steady_clock::now();
        send(Op::hello,
             Map().put("protocol", std::pair(1, 14)).put("client", string("nanocore-cpp")));
        for (welcome_.reset(); !welcome_;) take_in(milliseconds(1000));
    }
    bool try_open(bool is_last) try {
        open();
        return true;
    } catch (const Error&) {
        return is_last ? throw : false;
    }
    void request(const Samples& samples, Map body) {
        const auto id = "cpp-" + std::to_string(++num_requests_);
        for (const auto& sample : samples)
            if (const auto stream = sample.lock()) {
                stream->request_id = id;
                stream->is_one_of_several_ = samples.size() > 1;
                stream->handle_.reset();
            }
        send(Op::submit, body.put("request_id", id));
        unanswered_[id] = samples;
    }
    /// Submits all that has not ended in a new session: behind its tokens, if it was accepted.
    void go_on() {
        auto lost = std::exchange(lost_, {});
        for (auto& [id, samples] : std::exchange(unanswered_, {})) lost.push_back(samples);
        for (auto& [handle, sample] : std::exchange(streams_, {})) lost.push_back({sample});
        const auto defaults = welcome_->get<Map>("model").get("default_sampling", Map());
        const auto end = steady_clock::now() + resume_;
        while (!try_open(steady_clock::now() > end))
            std::this_thread::sleep_for(milliseconds(100));
        for (const auto& samples : lost)
            for (const auto& sample : samples)
                if (const auto stream = sample.lock()) {
                    if (resume(*stream, defaults)) request(samples, stream->submit_);
                    break;
                }
    }
    /// Has its SUBMIT say where it stopped; false if it cannot go on.
    bool resume(Stream& stream, const Map& defaults) {
        auto& submit = stream.submit_;
        if (stream.deadline_)
            submit.drop("timeout_s")
                .put("timeout_s", std::max(1e-3, std::chrono::duration<double>(
                                                     *stream.deadline_ - steady_clock::now())
                                                     .count()));
        if (!stream.seed) return true;  // was not accepted
        const bool is_begun = !stream.token_ids.empty();
        if (++stream.num_lost_ == max_lost)
            stream.error_ = EngineError("lost several times in a row", "engine_dead", {});
        else if (is_begun && minor() < 9)
            stream.error_ = EngineError("output_token_ids needs protocol 1.9", "refused", {});
        auto sampling = submit.get("sampling", defaults);
        sampling.drop("n").drop("seed").put("seed", *stream.seed);
        stream.prompt_logprobs.resize(is_begun ? stream.prompt_logprobs.size() : 0);
        if (is_begun || !stream.is_first_) sampling.drop("prompt_logprobs");
        submit.drop("sampling").put("sampling", sampling).drop("output_token_ids");
        if (is_begun) submit.put("output_token_ids", bin(stream.token_ids));
        return !stream.error_;
    }
    bool take_in(milliseconds timeout) {
        zmq::pollitem_t items[] = {{socket_, 0, ZMQ_POLLIN, 0}, {watch_, 0, ZMQ_POLLIN, 0}};
        zmq::poll(items, 2, timeout);
        const bool arrived = zmq::poll(items, 1, milliseconds(0)) > 0;  // what came before that
        try {
            if (arrived)
                receive();
            else if (steady_clock::now() - heard_ > milliseconds(10'000))
                throw EngineDead("silent for 10 s");
            else if (items[1].revents)
                throw EngineDead("its connection closed");
            return arrived;
        } catch (const Error&) {
            failure_ = std::current_exception();
        } catch (const std::exception& error) {
            failure_ = std::make_exception_ptr(
                ProtocolError(string("malformed message: ") + error.what()));
        }
        std::rethrow_exception(failure_);
    }
    void send(Op op, const Map& map, int flags = 0) {
        msgpack::sbuffer body;
        msgpack::pack(body, map);
        zmq::multipart_t frames(&op, 1);
        frames.addmem(body.data(), body.size());
        if (!failure_ && !frames.send(socket_, flags))
            failure_ = std::make_exception_ptr(EngineDead("the engine takes no messages"));
        if (failure_) std::rethrow_exception(failure_);
    }
    void try_send(Op op, const Map& map, int flags = 0) noexcept try {
        send(op, map, flags);
    } catch (const std::exception&) {  // the session is over
    }
    void abort_sample(uint32_t handle) {
        const Bin column(reinterpret_cast<const char*>(&handle), 4);
        try_send(Op::abort, Map().put("request_ids", vector<string>{}).put("handles", column));
    }
    void receive() {
        zmq::multipart_t frames(socket_);
        heard_ = steady_clock::now();
        if (frames.size() != 2 || frames[0].size() != 1)
            throw msgpack::parse_error("not two frames");
        const msgpack::unpack_limit limit(1 << 18, 1 << 10, 1 << 24, 1 << 24, 0,
                                          32);  // the last: depth
        const auto [data, size] = std::pair(frames[1].data<char>(), frames[1].size());
        const auto body = msgpack::unpack(data, size, nullptr, nullptr, limit)->as<Map>();
        switch (Op{*frames[0].data<unsigned char>()}) {
            case Op::welcome:
                if (body.get<std::pair<int, int>>("protocol").first != 1)
                    throw ProtocolError("not protocol 1");
                welcome_ = body;
                return;
            case Op::refused:
                throw EngineError("refused: " + body.get<string>("message", ""), "refused",
                                  body.get<optional<double>>("retry_after_s", {}));
            case Op::accepted: {
                auto handle = body.get<uint32_t>("handle");
                auto seed = body.get<optional<uint64_t>>("seed", {});
                if (const auto node = unanswered_.extract(body.get<string>("request_id")))
                    for (const auto& sample : node.mapped()) {
                        const bool is_one_of_several = node.mapped().size() > 1;
                        if (const auto stream = sample.lock()) {
                            stream->seed = seed;
                            if (is_one_of_several) stream->handle_ = handle;
                        } else if (is_one_of_several)
                            abort_sample(handle);
                        streams_[handle++] = sample;
                        if (seed) *seed = (*seed + 1) % (uint64_t{1} << 53);
                    }
                return;
            }
            case Op::output:
                return deliver(body);
            case Op::error: {
                const auto code = body.get<string>("code"),
                           message = code + ": " + body.get<string>("message");
                if (code == "engine_dead" || code == "no_session") throw EngineDead(message);
                const EngineError error(message, code,
                                        body.get<optional<double>>("retry_after_s", {}));
                if (!body.get<optional<string>>("request_id", {})) throw error;
                if (const auto node = unanswered_.extract(body.get<string>("request_id"))) {
                    if (resume_.count() && code == "draining")
                        lost_.push_back(node.mapped());  // to the next engine
                    else
                        for (const auto& sample : node.mapped())
                            if (const auto stream = sample.lock()) stream->error_ = error;
                }
                return;
            }
            case Op::ping:
                return send(Op::pong, Map().put("nonce", body.get<uint64_t>("nonce", 0)));
            case Op::pong:
            case Op::draining:
                return;
            case Op::reply:
                body.get<Bin>("data",
                              {});  // of a wrong type it is malformed, whether asked for or not
                if (body.get<uint64_t>("call_id") == call_id_) reply_ = body;
                return;
            case Op::bye:
                throw EngineDead("the engine said BYE: " + body.get<string>("reason", ""));
            default:
                throw ProtocolError("malformed message: not an op of engines");
        }
    }
    std::shared_ptr<Stream> find(
        uint32_t handle) const {  // nullptr: unknown, or nobody wants it any more
        return streams_.count(handle) ? streams_.at(handle).lock() : nullptr;
    }
    void deliver(const Map& output) {
        const auto handles = column<uint32_t>(output, "handles");
        const auto tokens = column<int32_t>(output, "tokens");
        const auto counts = column<uint32_t>(output, "counts", vector<uint32_t>(handles.size(), 1));
        const auto num_tokens = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
        if (counts.size() != handles.size() || num_tokens != tokens.size())
            throw ProtocolError("malformed message: columns do not fit together");
        auto token = tokens.begin();
        for (size_t i = 0; i < handles.size(); token += counts[i++])
            if (const auto stream = find(handles[i]); stream && counts[i])
                for (auto* ids : {&stream->unread_, &stream->token_ids}) {
                    ids->insert(ids->end(), token, token + counts[i]);
                    stream->num_lost_ = 0;
                }
        for (auto& [handle, entry] : entries(output, "logprobs"))
            if (const auto stream = find(handle)) stream->logprobs.push_back(std::move(entry));
        for (auto& [handle, entry] : entries(output, "prompt_logprobs"))
            if (const auto stream = find(handle))
                stream->prompt_logprobs.push_back(std::move(entry));
        for (const auto& event : output.get<vector<Map>>("events", {})) {
            const auto handle = event.get<uint32_t>("handle");
            const auto finish_reason = event.get<optional<string>>("finish_reason", {});
            const bool is_lost = resume_.count() && finish_reason == "abort" && event.has("message");
            if (is_lost)  // the engine stops
                lost_.push_back({streams_[handle]});
            else if (const auto stream = find(handle)) {
                stream->num_cached_tokens =
                    event.get("num_cached_tokens", stream->num_cached_tokens);
                stream->stop_reason = event.get("stop_reason", stream->stop_reason);
                stream->stop_cause = event.get("stop_cause", stream->stop_cause);
                stream->message = event.get("message", stream->message);
                stream->finish_reason = finish_reason;
                stream->embedding = column<float>(event, "embedding");
            }
            if (finish_reason) streams_.erase(handle);
        }
    }
    string endpoint_;
    optional<CurveKeys> keys_;
    milliseconds resume_;
    zmq::context_t context_;
    zmq::socket_t socket_, watch_;
    steady_clock::time_point heard_ = steady_clock::now();
    optional<Map> welcome_, reply_;
    std::exception_ptr failure_;
    uint64_t num_requests_ = 0, call_id_ = 0, num_sessions_ = 0;
    std::map<string, Samples> unanswered_;               // SUBMITs, by request_id
    std::map<uint32_t, std::weak_ptr<Stream>> streams_;  // by handle
    vector<Samples> lost_;  // what the engine has let go, for it stops
};
}  // namespace nanocore
