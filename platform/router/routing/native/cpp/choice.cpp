// The choice of a replica among those of some pools, behind a plain C ABI for one thread: filter, cost and tie of
// penstock.router.routing.policy, and what a decision keeps of those that it compared (penstock.router.routing.search).
//
// Everything is the caller's memory. Replicas are known by their places: those of one pool behind those of the pool before.

#include "model.hpp"

namespace penstock {
namespace {

constexpr double TIE_S = 0.001, TIE_SHARE = 0.03;  // penstock.router.routing.policy
constexpr int64_t NUM_CHEAPEST = 4;                // penstock.router.routing.search
constexpr int64_t MAX_CERTAIN = 5, MAX_KEPT = MAX_CERTAIN + NUM_CHEAPEST, NUM_FIELDS = 11;
const double NEVER_S = __builtin_inf();

// Why a replica can't take a request, the mildest first.
enum Obstacle : int64_t { NO_BLOCKS, NO_ADAPTER_SLOT, NO_CREDIT, CONTEXT, NO_REPLICA, NONE = -1 };

// The replicas of a pool in columns of `size`, as ReplicaTable and WorkTable have them, and what the request finds there.
struct Pool {
    const double *numbers, *own_tpot_s, *columns;
    const Packed* costs;
    const double* cached_tokens;
    const uint8_t* is_allowed;  // nothing: everywhere
    const double* start_wait_s;  // nothing: no time
    const uint8_t* lacks_adapter_slot;  // nothing: nowhere
    int64_t size;

    double max_model_len(int64_t row) const { return columns[row]; }
    double credit(int64_t row) const { return columns[size + row]; }
    double num_inflight(int64_t row) const { return columns[2 * size + row]; }
    double may_crowd(int64_t row) const { return columns[3 * size + row]; }
    double limit_tokens(int64_t row) const { return columns[5 * size + row]; }
    double wait_s(int64_t row) const { return start_wait_s == nullptr ? 0 : start_wait_s[row]; }

    Work work(int64_t row) const {
        return {numbers[row], numbers[size + row], numbers[2 * size + row], numbers[3 * size + row], numbers[4 * size + row], numbers[5 * size + row]};
    }
};

// What a comparison finds, and what is kept of it. Pointers: room for each replica.
struct Room {
    double *cost_s, *ttft_s;
    int64_t* tied;
    int64_t num_candidates, num_tied, best, least_cached, most_cached, obstacle;
    double mean_backlog_s;  // of the candidates
    int64_t num_kept, chosen, one, other, holds_most;  // the last four: places among the kept, and a truth
    int64_t kept[MAX_KEPT];
    double fields[MAX_KEPT * NUM_FIELDS];
};

Obstacle find_obstacle(const Pool& pool, int64_t row, double num_tokens, bool may_overdraw) {
    if (pool.max_model_len(row) == 0 || (pool.is_allowed != nullptr && !pool.is_allowed[row])) return NO_REPLICA;
    if (num_tokens >= pool.max_model_len(row)) return CONTEXT;
    const bool is_overdrawn = may_overdraw && pool.may_crowd(row) > 0;
    if (pool.num_inflight(row) >= pool.credit(row) && !is_overdrawn) return NO_CREDIT;
    if (pool.lacks_adapter_slot != nullptr && pool.lacks_adapter_slot[row]) return NO_ADAPTER_SLOT;
    return num_tokens - pool.cached_tokens[row] < pool.limit_tokens(row) || is_overdrawn ? NONE : NO_BLOCKS;
}

// Writes each candidate's factor in the place of its cost, NEVER_S for the others, and the candidates' mean backlog.
void find_candidates(const Pool* pools, int64_t num_pools, double num_tokens, bool may_overdraw, Room& room) {
    double total_s = 0;
    room.num_candidates = room.num_tied = 0;
    room.obstacle = NO_REPLICA;
    int64_t place = 0;
    for (const Pool* pool = pools; pool != pools + num_pools; pool++) {
        const Costs common(*pool->costs, 1);
        for (int64_t row = 0; row < pool->size; row++, place++) {
            const Obstacle obstacle = find_obstacle(*pool, row, num_tokens, may_overdraw);
            if (obstacle != NONE) {
                if (obstacle < room.obstacle) room.obstacle = obstacle;
                room.cost_s[place] = NEVER_S;
                continue;
            }
            const Work work = pool->work(row);
            room.cost_s[place] = excess(common, work, pool->own_tpot_s[row]);
            total_s += work.prefill_tokens * (pool->costs->prefill_token_s * room.cost_s[place]);
            room.num_candidates++;
        }
    }
    if (room.num_candidates) room.mean_backlog_s = total_s / static_cast<double>(room.num_candidates);
}

// A replica by its place.
struct Found {
    const Pool& pool;
    int64_t row;
};

Found find(const Pool* pools, int64_t place) {
    while (place >= pools->size) place -= pools++->size;
    return {*pools, place};
}

double cached_at(const Pool* pools, int64_t place) {
    const Found found = find(pools, place);
    return found.pool.cached_tokens[found.row];
}

// Whether the second one of two that cost the same has less to do.
bool is_less_crowded(const Pool* pools, int64_t first, int64_t second) {
    const Found one = find(pools, first), other = find(pools, second);
    const double requests = one.pool.num_inflight(one.row) - other.pool.num_inflight(other.row);
    if (requests != 0) return requests > 0;
    const double rows = one.pool.work(one.row).rows() - other.pool.work(other.row).rows();
    if (rows != 0) return rows > 0;
    return other.pool.cached_tokens[other.row] > one.pool.cached_tokens[one.row];
}

// Places without order, each once.
struct Places {
    int64_t* places;
    int64_t count;

    bool has(int64_t place) const {
        for (int64_t index = 0; index < count; index++) {
            if (places[index] == place) return true;
        }
        return false;
    }

    void add(int64_t place) {
        if (!has(place)) places[count++] = place;
    }

    void sort() {
        for (int64_t index = 1; index < count; index++) {
            const int64_t place = places[index];
            int64_t at = index;
            for (; at && places[at - 1] > place; at--) places[at] = places[at - 1];
            places[at] = place;
        }
    }

    int64_t find(int64_t place) const {
        for (int64_t index = 0; index < count; index++) {
            if (places[index] == place) return index;
        }
        return -1;
    }
};

// Adds those that are kept beside the certain ones: all where they are few, some that cost the same, or the next one.
void add_others(const Room& room, int64_t total, Places& kept) {
    if (room.num_candidates <= kept.count + NUM_CHEAPEST) {
        for (int64_t place = 0; place < total; place++) {
            if (room.cost_s[place] < NEVER_S) kept.add(place);
        }
        return;
    }
    if (room.num_tied >= NUM_CHEAPEST) {
        for (int64_t index = 0; index < NUM_CHEAPEST; index++) kept.add(room.tied[index]);
        return;
    }
    int64_t next = -1;
    for (int64_t place = 0; place < total; place++) {
        if (room.cost_s[place] < NEVER_S && (next < 0 || room.cost_s[place] < room.cost_s[next]) && !kept.has(place)) next = place;
    }
    kept.add(next);
}

void copy_fields(const Pool* pools, const Room& room, int64_t place, double* to) {
    const Found found = find(pools, place);
    const Work work = found.pool.work(found.row);
    const double factor = excess(Costs(*found.pool.costs, 1), work, found.pool.own_tpot_s[found.row]);
    const double fields[NUM_FIELDS] = {
        work.running, work.waiting, work.prefill_tokens, work.kv_tokens, work.sampled, work.max_batched_tokens,
        found.pool.num_inflight(found.row), found.pool.cached_tokens[found.row], found.pool.wait_s(found.row), room.ttft_s[place], factor,
    };
    for (int64_t index = 0; index < NUM_FIELDS; index++) to[index] = fields[index];
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

int32_t penstock_choice_abi() { return 3; }

// Compares all replicas for a request.
void penstock_choice_compare(const Pool* pools, int64_t num_pools, Room* room, int64_t num_tokens, double expected_output_tokens, int64_t scored_tokens, int64_t may_overdraw) {
    const auto tokens = static_cast<double>(num_tokens);
    find_candidates(pools, num_pools, tokens, may_overdraw != 0, *room);
    if (!room->num_candidates) return;
    Score best = {NEVER_S, NEVER_S};
    double least = 0, most = 0;
    bool is_first = true;
    int64_t place = 0;
    for (const Pool* pool = pools; pool != pools + num_pools; pool++) {
        const Costs common(*pool->costs, 1);
        for (int64_t row = 0; row < pool->size; row++, place++) {
            if (room->cost_s[place] == NEVER_S) continue;
            const Work work = pool->work(row);
            const double cached = pool->cached_tokens[row], factor = room->cost_s[place];
            const auto score_by = [&](const Costs& costs) {
                return score(costs, work, tokens, cached, pool->wait_s(row), expected_output_tokens, scored_tokens, room->mean_backlog_s);
            };
            const Score found = factor == 1 ? score_by(common) : score_by(Costs(*pool->costs, factor));
            room->cost_s[place] = found.cost_s;
            room->ttft_s[place] = found.ttft_s;
            if (is_first || found < best) best = found, room->best = place;
            if (is_first || cached < least) least = cached, room->least_cached = place;
            if (is_first || cached > most) most = cached, room->most_cached = place;
            is_first = false;
        }
    }
    const double within_s = larger(TIE_S, TIE_SHARE * best.ttft_s);
    for (int64_t other = 0; other < place; other++) {
        if (room->cost_s[other] - best.cost_s <= within_s) room->tied[room->num_tied++] = other;
    }
}

// Chooses of those compared, and copies what is kept of them. one, other: the two drawn, as numbers among those tied; -1: none were.
void penstock_choice_keep(const Pool* pools, int64_t num_pools, Room* room, int64_t one, int64_t other) {
    const bool is_drawn = one >= 0;
    const int64_t first = is_drawn ? room->tied[one] : room->best, second = is_drawn ? room->tied[other] : room->best;
    const int64_t chosen = is_drawn && is_less_crowded(pools, first, second) ? second : first;
    const double cached = cached_at(pools, chosen), most = cached_at(pools, room->most_cached);
    Places kept = {room->kept, 0};
    kept.add(chosen);
    kept.add(room->best);
    kept.add(first);
    kept.add(second);
    if (cached > 0) {
        kept.add(room->least_cached);
        kept.add(room->most_cached);
    }
    int64_t total = 0;
    for (int64_t index = 0; index < num_pools; index++) total += pools[index].size;
    add_others(*room, total, kept);
    kept.sort();
    room->num_kept = kept.count;
    room->chosen = kept.find(chosen);
    room->one = is_drawn ? kept.find(first) : -1;
    room->other = is_drawn ? kept.find(second) : -1;
    room->holds_most = cached == most && most > cached_at(pools, room->least_cached);
    for (int64_t index = 0; index < kept.count; index++) copy_fields(pools, *room, kept.places[index], room->fields + index * NUM_FIELDS);
}
}
