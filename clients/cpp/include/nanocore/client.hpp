// A client of a nanocore engine: C++17, cppzmq, msgpack-c.
//
// An Engine is one session and belongs, with its Streams, to one thread. Whoever waits, for a
// stream or a reply, takes in what arrives for everybody and answers PINGs. A program that waits
// for nothing calls Engine::poll now and then: an engine closes a session that is silent for 30 s.
#pragma once
#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <zmq_addon.hpp>
#include "messages.hpp"

namespace nanocore {
using std::chrono::milliseconds;

struct Request {
    class Engine* engine;  // nullptr: the request has ended
    string id;
    optional<uint32_t> handle{};
    optional<uint64_t> seed{}, num_cached_tokens{}, stop_reason{};
    optional<string> finish_reason{}, message{};
    TokenIds unread{};
    std::exception_ptr error{};
    bool aborted = false;
};

/// A request's output. A Stream that goes before its request has ended aborts it.
class Stream {
public:
    explicit Stream(shared_ptr<Request> request) : request_(std::move(request)) {}
    Stream(Stream&&) = default;
    Stream& operator=(Stream&& other) noexcept { return request_.swap(other.request_), *this; }
    ~Stream() { abort(); }
    /// Waits for tokens: one or more, or nullopt after the last. Throws if the request has failed.
    optional<TokenIds> next();
    /// Whether `next` would not wait.
    bool ready() const { return !request_->engine || !request_->unread.empty(); }
    /// Asks for an early end, once; `next` goes on until it comes.
    void abort() noexcept;
    const Request* operator->() const { return request_.get(); }

private:
    shared_ptr<Request> request_;
};

struct CurveKeys { string server_public, client_public, client_secret; };  // Z85, 40 characters
struct Options {
    milliseconds timeout{10'000};  // for the answer to HELLO
    string name = "nanocore-cpp";  // for the engine's log
    optional<CurveKeys> keys{};    // tcp:// needs them
};

class Engine {
public:
    /// Opens a session. Throws EngineDead, ProtocolError, or Error if the endpoint is none.
    explicit Engine(const string& endpoint, const Options& options = {}) try {
        if (options.keys) {
            socket_.set(zmq::sockopt::curve_serverkey, options.keys->server_public);
            socket_.set(zmq::sockopt::curve_publickey, options.keys->client_public);
            socket_.set(zmq::sockopt::curve_secretkey, options.keys->client_secret);
        } else if (endpoint.rfind("tcp://", 0) == 0) {
            throw Error("tcp:// is served with CURVE only: Options::keys are missing");
        }
        socket_.set(zmq::sockopt::sndhwm, 1000);
        socket_.set(zmq::sockopt::rcvhwm, 1000);
        socket_.set(zmq::sockopt::maxmsgsize, int64_t{16} << 20);
        socket_.set(zmq::sockopt::linger, 200);  // an ABORT or BYE just sent still leaves
        socket_.connect(endpoint);
        post(Op::hello, Writer().put("protocol", Version(1, 3)).put("client", options.name));
        for (const auto deadline = heard_ + options.timeout; !welcome_;) {
            const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
            if (left.count() <= 0) throw EngineDead("no engine answered at " + endpoint);
            poll(left);
        }
    } catch (const zmq::error_t& error) {
        throw Error("endpoint " + endpoint + " cannot be used: " + error.what());
    }
    Engine(const Engine&) = delete;
    ~Engine() { end(std::make_exception_ptr(EngineDead("this client is closed"))); }

    const Map& welcome() const { return *welcome_; }

    Stream submit(Submit submit) {
        while (submit.request_id.empty()) {
            const auto id = "cpp-" + std::to_string(++num_requests_);
            if (!requests_.count(id)) submit.request_id = id;
        }
        if (requests_.count(submit.request_id))
            throw EngineError("duplicate_request_id", submit.request_id + " is in use");
        const shared_ptr<Request> request(new Request{this, submit.request_id});
        post(Op::submit, submit);
        requests_[request->id] = request;
        wait_sent();
        return Stream(request);
    }
    /// The REPLY to an operation; its `ok` is false if it could not be done.
    Map control(const string& operation, const optional<string>& file = {}, uint64_t offset = 0) {
        Writer map;
        map.put("call_id", ++call_id_).put("operation", operation).put("file", file);
        post(Op::control, offset ? map.put("offset", offset) : map);
        for (reply_.reset(); !reply_;) poll(silence);
        return *reply_;
    }
    Map stats() { return control("stats").get<Map>("stats"); }
    /// One of the files in the model card. Its sha256 there is for the caller to compare.
    string read_file(const string& name) {
        for (string content;;) {
            const auto reply = control("read_file", name, content.size());
            if (!reply.get("ok", true)) throw Error(reply.get<string>("message"));
            const auto chunk = reply.get<Column<char>>("data");
            if (chunk.empty()) return content;
            content.append(chunk.begin(), chunk.end());
            expect(content.size() <= 64 << 20, "a file of at most 64 MiB");
        }
    }
    /// Takes in what has arrived or arrives in time, and answers PINGs.
    void poll(milliseconds timeout = milliseconds(0)) {
        pump(timeout), check();
    }

private:
    friend class Stream;
    using Clock = std::chrono::steady_clock;
    static constexpr milliseconds silence{10'000}, grace{1'000};

    void check() const {
        if (failure_) std::rethrow_exception(failure_);
    }
    template <class T> void post(Op op, const T& map) {
        check(), outbox_.emplace_back(static_cast<char>(op), pack(map)), flush();
    }
    void wait_sent() {  // for an engine that does not read
        while (!outbox_.empty()) poll(silence);
    }
    void flush() {
        for (; !outbox_.empty(); outbox_.pop_front()) {
            const auto& [op, body] = outbox_.front();
            const std::array<zmq::const_buffer, 2> frames{zmq::buffer(&op, 1), zmq::buffer(body)};
            if (!zmq::send_multipart(socket_, frames, zmq::send_flags::dontwait)) return;
        }
    }
    void pump(milliseconds timeout) try {
        if (failure_) return;
        flush();
        // A process that was stopped finds what was sent meanwhile only after a moment.
        const auto left = std::chrono::ceil<milliseconds>(heard_ + silence - Clock::now());
        const bool late = welcome_ && left.count() <= 0;
        if (welcome_) timeout = late ? grace : std::min(timeout, left);
        const int events = outbox_.empty() ? ZMQ_POLLIN : ZMQ_POLLIN | ZMQ_POLLOUT;
        zmq::pollitem_t item{socket_.handle(), 0, static_cast<short>(events), 0};
        if (zmq::poll(&item, 1, timeout) == 0 && late) throw EngineDead("the engine is silent");
        for (int num_messages = 0; num_messages < 64; ++num_messages) {
            vector<zmq::message_t> frames;
            const auto out = std::back_inserter(frames);
            if (!zmq::recv_multipart_n(socket_, out, 2, zmq::recv_flags::dontwait)) break;
            heard_ = Clock::now();
            take(decode(frames));
        }
        flush();
    } catch (const zmq::error_t& error) {
        if (error.num() != EINTR) end(std::make_exception_ptr(Error(error.what())));
    } catch (const Error&) {
        end(std::current_exception());
    } catch (const std::exception& error) {  // more than two frames
        end(std::make_exception_ptr(ProtocolError(error.what())));
    }
    void take(const Message& message) {
        const auto& [op, body] = message;
        switch (op) {
        case Op::welcome:
            if (body.get<Version>("protocol").first != 1) throw ProtocolError("not protocol 1");
            return void(welcome_ = body);
        case Op::refused: throw ProtocolError("refused: " + body.get<string>("message"));
        case Op::accepted: return accept(body);
        case Op::output: return deliver(body);
        case Op::error: return fail(body);
        case Op::ping: return post(Op::pong, Writer().put("nonce", body.get<uint64_t>("nonce", 0)));
        case Op::reply:
            if (body.get<uint64_t>("call_id") == call_id_) reply_ = body;
            return;
        case Op::bye: throw EngineDead("the engine said BYE: " + body.get<string>("reason", ""));
        default: return;  // PONG
        }
    }
    void accept(const Map& body) {
        const auto found = requests_.find(body.get<string>("request_id"));
        if (found == requests_.end()) return;
        found->second->seed = body.get<uint64_t>("seed");
        found->second->handle = body.get<uint32_t>("handle");
        handles_[*found->second->handle] = found->second;
    }
    void fail(const Map& body) {
        const EngineError error(body.get<string>("code"), body.get<string>("message"),
                                body.get<optional<double>>("retry_after_s", {}));
        const auto request_id = body.get<optional<string>>("request_id", {});
        if (error.code == "engine_dead") throw EngineDead(error.what());
        if (!request_id) throw error;
        if (const auto found = requests_.find(*request_id); found != requests_.end())
            finish(found->second, std::make_exception_ptr(error));
    }
    void deliver(const Map& output) {
        const auto handles = output.get<Column<uint32_t>>("handles", {});
        const auto tokens = output.get<Column<int32_t>>("tokens", {});
        const auto counts = output.get<optional<Column<uint32_t>>>("counts", {});
        auto token = tokens.begin();
        for (size_t i = 0; i < handles.size(); ++i) {
            const auto last = token + (counts ? (*counts)[i] : 1);
            if (const auto found = handles_.find(handles[i]); found != handles_.end())
                found->second->unread.insert(found->second->unread.end(), token, last);
            token = last;
        }
        for (const auto& event : output.get<vector<Map>>("events", {})) {
            const auto found = handles_.find(event.get<uint32_t>("handle"));
            if (found == handles_.end()) continue;
            auto& request = *found->second;
            if (const auto num = event.get<optional<uint64_t>>("num_cached_tokens", {}))
                request.num_cached_tokens = num;
            request.finish_reason = event.get<optional<string>>("finish_reason", {});
            request.stop_reason = event.get<optional<uint64_t>>("stop_reason", {});
            request.message = event.get<optional<string>>("message", {});
            if (request.finish_reason) finish(found->second, nullptr);
        }
    }
    void finish(const shared_ptr<Request> request, std::exception_ptr error) {
        request->engine = nullptr;
        request->error = error;
        requests_.erase(request->id);
        if (request->handle) handles_.erase(*request->handle);
    }
    void end(std::exception_ptr failure) noexcept {
        if (std::exchange(failure_, failure_ ? failure_ : failure)) return;
        for (const auto& [id, request] : requests_)
            request->engine = nullptr, request->error = failure;
        requests_.clear(), handles_.clear();
        try {
            outbox_.emplace_back(static_cast<char>(Op::bye), pack(Writer())), flush();
        } catch (const zmq::error_t&) {  // then it cannot be told
        }
        socket_.close();
    }

    zmq::context_t context_;
    zmq::socket_t socket_{context_, zmq::socket_type::dealer};
    Clock::time_point heard_ = Clock::now();
    optional<Map> welcome_, reply_;
    uint64_t num_requests_ = 0, call_id_ = 0;
    std::exception_ptr failure_;
    std::deque<std::pair<char, string>> outbox_;
    std::map<string, shared_ptr<Request>> requests_;    // those that have not ended
    std::map<uint32_t, shared_ptr<Request>> handles_;  // of these, the accepted ones
};

inline optional<TokenIds> Stream::next() {
    while (!ready()) request_->engine->pump(Engine::silence);
    if (!request_->unread.empty()) return std::exchange(request_->unread, {});
    if (request_->error) std::rethrow_exception(request_->error);
    return std::nullopt;
}
inline void Stream::abort() noexcept {
    if (!request_ || !request_->engine || std::exchange(request_->aborted, true)) return;
    request_->engine->post(Op::abort, Writer().put("request_ids", vector<string>{request_->id}));
}

}  // namespace nanocore
