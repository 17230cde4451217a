// The mirror of the blocks that replicas hold, behind a plain C ABI for one thread.
//
// A replica has a slot, whose number stands for it among the owners of a block. A slot that is given up is dead: look-ups pass over it
// at once, a later call at a time takes it out of one part of the table, and when it is out of all of them it is used again. So neither a
// replica's end nor a snapshot walks through what was held before.

#include "stamps.hpp"

namespace penstock {
namespace {

constexpr int AT_ONCE = 16;  // keys whose cells are on their way from memory together
constexpr int KEY_BYTES = 16;
constexpr uint32_t NO_SLOT = 0xffffffffu;

enum State : uint8_t { FREE, LIVE, DYING, DEAD };  // DYING: the sweep that is under way takes it out of the table; DEAD: the next one does

struct Slot {
    int64_t num_held;
    uint32_t origin, num_stamps;
    State state;
};

struct Mirror {
    Table table;
    Stamps stamps;
    Slot* slots;
    uint64_t *dead, *alive;  // a bit for each slot; the latter is a look-up's
    uint32_t num_slots, capacity, last_origin, num_dead;
    int swept;  // parts that the sweep under way has done
};

bool widen_bits(uint64_t*& bits, uint32_t before, uint32_t more) {
    auto* made = static_cast<uint64_t*>(realloc(bits, more / 8));
    if (made == nullptr) return false;
    memset(made + before / 64, 0, (more - before) / 8);
    bits = made;
    return true;
}

bool widen(Mirror& mirror) {
    const uint32_t more = mirror.capacity ? 2 * mirror.capacity : 64;
    if (more > MAX_SLOTS) return false;
    auto* slots = static_cast<Slot*>(realloc(mirror.slots, more * sizeof(Slot)));
    if (slots == nullptr) return false;
    mirror.slots = slots;
    if (!widen_bits(mirror.dead, mirror.capacity, more) || !widen_bits(mirror.alive, mirror.capacity, more)) return false;
    mirror.capacity = more;
    return true;
}

// A sweep has come to its end: its slots are free, and those that died meanwhile are the next one's.
void finish_sweep(Mirror& mirror) {
    for (uint32_t number = 0; number < mirror.num_slots; number++) {
        Slot& slot = mirror.slots[number];
        if (slot.state == DYING) {
            slot.state = FREE;
            mirror.dead[number / 64] &= ~(uint64_t{1} << number % 64);
            mirror.num_dead--;
        } else if (slot.state == DEAD) {
            slot.state = DYING;
        }
    }
    while (mirror.num_slots && mirror.slots[mirror.num_slots - 1].state == FREE) mirror.num_slots--;
    mirror.swept = 0;
}

void sweep(Mirror& mirror, int num_parts) {
    for (int done = 0; done < num_parts && mirror.num_dead; done++) {
        mirror.table.part(mirror.swept++).sweep(mirror.dead);
        if (mirror.swept == NUM_PARTS) finish_sweep(mirror);
    }
}

uint32_t open(Mirror& mirror, uint32_t origin, uint32_t num_stamps) {
    uint32_t number = 0;
    while (number < mirror.num_slots && mirror.slots[number].state != FREE) number++;
    if (number == mirror.capacity && !widen(mirror)) return NO_SLOT;
    if (number == mirror.num_slots) mirror.num_slots++;
    mirror.slots[number] = {0, origin, num_stamps, LIVE};
    return number;
}

void close(Mirror& mirror, uint32_t number) {
    mirror.slots[number].state = mirror.swept == 0 ? DYING : DEAD;
    mirror.dead[number / 64] |= uint64_t{1} << number % 64;
    mirror.num_dead++;
}

// Calls `act` with each key, whose cells are fetched before.
template <typename Act>
void each(const Mirror& mirror, const char* keys, int64_t count, Act act) {
    for (int64_t from = 0; from < count; from += AT_ONCE) {
        const int64_t end = from + AT_ONCE < count ? from + AT_ONCE : count;
        for (int64_t index = from; index < end; index++) mirror.table.fetch(read_key(keys + index * KEY_BYTES));
        for (int64_t index = from; index < end; index++) act(read_key(keys + index * KEY_BYTES));
    }
}

Stamp* find_stamp(const Mirror& mirror, const Slot& slot, const Key& key) {
    return slot.num_stamps ? mirror.stamps.find(key, slot.origin) : nullptr;
}

void hold(Mirror& mirror, uint32_t number, const char* keys, int64_t count) {
    Slot& slot = mirror.slots[number];
    each(mirror, keys, count, [&](const Key& key) {
        if (mirror.table.add(key, number, mirror.dead)) {
            slot.num_held++;
        } else if (Stamp* stamp = find_stamp(mirror, slot, key)) {
            mirror.stamps.remove(stamp);
            slot.num_stamps--;
            slot.num_held++;
        }
    });
}

void drop(Mirror& mirror, uint32_t number, const char* keys, int64_t count) {
    Slot& slot = mirror.slots[number];
    each(mirror, keys, count, [&](const Key& key) {
        const Cell* cell = mirror.table.find(key);
        if (cell == nullptr || !cell->owners.has(number) || find_stamp(mirror, slot, key) != nullptr) return;
        mirror.table.remove(key, number, mirror.dead);
        slot.num_held--;
    });
}

int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit < 0 ? 0 : limit; }

struct Depths {
    uint32_t *slots, *depths;
    int64_t count;

    void record(uint64_t bits, uint32_t index, int64_t depth) {
        for (; bits; bits &= bits - 1) {
            slots[count] = 64 * index + static_cast<uint32_t>(__builtin_ctzll(bits));
            depths[count++] = static_cast<uint32_t>(depth);
        }
    }
};

// Whether the set has every slot that is alive.
bool covers(const Mask& set, const uint64_t* alive, uint32_t num_words) {
    uint64_t missing = 0;
    for (uint32_t index = 0; index < num_words; index++) missing |= alive[index] & ~(index < set.num_words ? set.words[index] : 0);
    return !missing;
}

// Leaves those alive that own the cell too; the others have come as far as `depth`. Returns whether any is left.
bool intersect(Mirror& mirror, const Cell* cell, uint32_t num_words, int64_t depth, Depths& found) {
    const Mask* set = cell == nullptr ? nullptr : cell->owners.mask();
    if (set != nullptr && covers(*set, mirror.alive, num_words)) return true;
    uint64_t left = 0;
    for (uint32_t index = 0; index < num_words; index++) {
        const uint64_t before = mirror.alive[index];
        if (!before) continue;
        const uint64_t after = cell == nullptr ? 0 : before & cell->owners.bits(index);
        if (after != before) found.record(before & ~after, index, depth);
        mirror.alive[index] = after;
        left |= after;
    }
    return left != 0;
}

// Cells of some keys, with what they point at on its way.
void fetch(const Mirror& mirror, const char* keys, int64_t count, const Cell** cells) {
    for (int64_t index = 0; index < count; index++) mirror.table.fetch(read_key(keys + index * KEY_BYTES));
    for (int64_t index = 0; index < count; index++) {
        cells[index] = mirror.table.find(read_key(keys + index * KEY_BYTES));
        if (cells[index] != nullptr) __builtin_prefetch(cells[index]->owners.mask());
    }
}

int64_t look_up(Mirror& mirror, const char* keys, int64_t count, Depths& found) {
    const Cell* first = count ? mirror.table.find(read_key(keys)) : nullptr;
    if (first == nullptr) return 0;
    const uint32_t num_words = words_of(mirror.num_slots);
    bool is_any = false;
    for (uint32_t index = 0; index < num_words; index++) {
        mirror.alive[index] = first->owners.bits(index) & ~mirror.dead[index];
        is_any |= mirror.alive[index] != 0;
    }
    const Cell* cells[AT_ONCE];
    for (int64_t from = 1; from < count && is_any; from += AT_ONCE) {
        const int64_t num = at_most(count - from, AT_ONCE);
        fetch(mirror, keys + from * KEY_BYTES, num, cells);
        for (int64_t index = 0; index < num && is_any; index++) is_any = intersect(mirror, cells[index], num_words, from + index, found);
    }
    for (uint32_t index = 0; index < num_words; index++) found.record(mirror.alive[index], index, count);
    return found.count;
}

}  // namespace
}  // namespace penstock

using penstock::Mirror;

extern "C" {

int32_t penstock_mirror_abi() { return 1; }

// Nothing where there is no memory.
Mirror* penstock_mirror_begin() {
    auto* mirror = static_cast<Mirror*>(calloc(1, sizeof(Mirror)));
    if (mirror == nullptr || (mirror->table.begin() && penstock::widen(*mirror))) return mirror;
    free(mirror);
    return nullptr;
}

void penstock_mirror_end(Mirror* mirror) {
    mirror->table.end();
    mirror->stamps.clear();
    free(mirror->slots);
    free(mirror->dead);
    free(mirror->alive);
    free(mirror);
}

// A slot without entries for a new replica; -1 where there is no memory or no number left.
int64_t penstock_mirror_open(Mirror* mirror) {
    const uint32_t number = penstock::open(*mirror, mirror->last_origin + 1, 0);
    if (number == penstock::NO_SLOT) return -1;
    mirror->last_origin++;
    return number;
}

// The replica has no entries any more, and no slot.
void penstock_mirror_close(Mirror* mirror, uint32_t slot) { penstock::close(*mirror, slot); }

uint32_t penstock_mirror_origin(const Mirror* mirror, uint32_t slot) { return mirror->slots[slot].origin; }

int64_t penstock_mirror_num_held(const Mirror* mirror, uint32_t slot) { return mirror->slots[slot].num_held; }

// What a replica's cache lost, and then what it gained, at most so much that `max_held` keys are held.
void penstock_mirror_apply(Mirror* mirror, uint32_t slot, const char* removed, int64_t num_removed, const char* stored, int64_t num_stored, int64_t max_held) {
    penstock::drop(*mirror, slot, removed, num_removed);
    penstock::hold(*mirror, slot, stored, penstock::at_most(num_stored, max_held - mirror->slots[slot].num_held));
    penstock::sweep(*mirror, 1);
}

// Another slot for the replica, which holds these keys and nothing else, and is predicted to hold what it was before; -1 as above.
int64_t penstock_mirror_replace(Mirror* mirror, uint32_t slot, const char* stored, int64_t num_stored, int64_t max_held) {
    const penstock::Slot before = mirror->slots[slot];
    const uint32_t made = penstock::open(*mirror, before.origin, before.num_stamps);
    if (made == penstock::NO_SLOT) return -1;
    penstock::close(*mirror, slot);
    if (before.num_stamps) {
        for (const auto* stamp = mirror->stamps.begin(); stamp != mirror->stamps.end(); stamp++) {
            if (stamp->origin == before.origin) mirror->table.add(stamp->key, made, mirror->dead);
        }
    }
    penstock::hold(*mirror, made, stored, penstock::at_most(num_stored, max_held));
    return made;
}

// Predicts keys; those that are not held go to `predicted` (as much room as the keys take), `most` of them. Returns how many.
int64_t penstock_mirror_expect(Mirror* mirror, uint32_t slot, uint32_t number, const char* keys, int64_t count, int64_t most, char* predicted) {
    penstock::Slot& owner = mirror->slots[slot];
    int64_t num = 0;
    penstock::each(*mirror, keys, count, [&](const penstock::Key& key) {
        if (num == most) return;
        penstock::Stamp* stamp = penstock::find_stamp(*mirror, owner, key);
        if (stamp != nullptr) {
            stamp->number = number;
        } else if (!mirror->table.add(key, slot, mirror->dead)) {
            return;
        } else if (mirror->stamps.add(key, owner.origin, number)) {
            owner.num_stamps++;
        } else {
            mirror->table.remove(key, slot, mirror->dead);
            return;
        }
        memcpy(predicted + penstock::KEY_BYTES * num++, &key, sizeof(key));
    });
    penstock::sweep(*mirror, 1);
    return num;
}

// Ends a prediction: keys that are predicted by another one, or held, stay. slot: of the origin, or -1 where it has none any more.
void penstock_mirror_lapse(Mirror* mirror, int64_t slot, uint32_t origin, uint32_t number, const char* keys, int64_t count) {
    penstock::each(*mirror, keys, count, [&](const penstock::Key& key) {
        penstock::Stamp* stamp = mirror->stamps.find(key, origin);
        if (stamp == nullptr || stamp->number != number) return;
        mirror->stamps.remove(stamp);
        if (slot < 0) return;
        mirror->slots[slot].num_stamps--;
        mirror->table.remove(key, static_cast<uint32_t>(slot), mirror->dead);
    });
}

// How many leading keys each slot has; slots that have none are left out. slots, depths: room for every slot. Returns their number.
int64_t penstock_mirror_look_up(Mirror* mirror, const char* keys, int64_t count, uint32_t* slots, uint32_t* depths) {
    penstock::Depths found = {slots, depths, 0};
    return penstock::look_up(*mirror, keys, count, found);
}

// Slots in use, dead ones too: every number is below.
uint32_t penstock_mirror_num_slots(const Mirror* mirror) { return mirror->num_slots; }

// Writes the keys that the slot holds (room for num_held of them), without predictions. Slow: it reads the whole table.
int64_t penstock_mirror_list(const Mirror* mirror, uint32_t slot, char* keys) {
    int64_t num = 0;
    for (int part = 0; part < penstock::NUM_PARTS; part++) {
        for (const auto *cell = mirror->table.part(part).begin_cells(), *end = mirror->table.part(part).end_cells(); cell != end; cell++) {
            if (!cell->owners.has(slot) || penstock::find_stamp(*mirror, mirror->slots[slot], cell->key) != nullptr) continue;
            memcpy(keys + penstock::KEY_BYTES * num++, &cell->key, sizeof(cell->key));
        }
    }
    return num;
}

// Takes out everything dead now, and returns the number of keys that are left. Slow: it writes the whole table.
int64_t penstock_mirror_collect(Mirror* mirror) {
    while (mirror->num_dead) penstock::sweep(*mirror, penstock::NUM_PARTS);
    int64_t num = 0;
    for (int part = 0; part < penstock::NUM_PARTS; part++) num += mirror->table.part(part).count;
    return num;
}
}
