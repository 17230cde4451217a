// The replicas that hold a block, as a set of slots in 64 bits: up to three of them in place, more as a bitmask elsewhere.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace penstock {

constexpr uint32_t MAX_SLOTS = 1u << 20;
constexpr int SLOT_BITS = 20, COUNT_BITS = 4, MAX_INLINE = 3;

inline uint32_t words_of(uint32_t slots) { return (slots + 63) / 64; }

// A set of slots in a whole number of words.
struct Mask {
    uint32_t num_words, count;
    uint64_t words[];
};

inline Mask* allocate_mask(uint32_t num_words) {
    auto* mask = static_cast<Mask*>(calloc(1, sizeof(Mask) + num_words * sizeof(uint64_t)));
    if (mask != nullptr) mask->num_words = num_words;
    return mask;
}

// Its low bits are the number of slots that lie behind them; where that is 0, it is the address of a mask, or 0: nobody.
class Owners {
public:
    bool empty() const { return word == 0; }
    int num_inline() const { return static_cast<int>(word & ((1 << COUNT_BITS) - 1)); }
    uint32_t at(int place) const { return word >> (COUNT_BITS + SLOT_BITS * place) & (MAX_SLOTS - 1); }
    Mask* mask() const { return num_inline() ? nullptr : reinterpret_cast<Mask*>(word); }

    bool has(uint32_t slot) const {
        if (const Mask* set = mask()) return slot / 64 < set->num_words && set->words[slot / 64] >> slot % 64 & 1;
        for (int place = 0; place < num_inline(); place++) {
            if (at(place) == slot) return true;
        }
        return false;
    }

    // The slots 64 * index to 64 * index + 63.
    uint64_t bits(uint32_t index) const {
        if (const Mask* set = mask()) return index < set->num_words ? set->words[index] : 0;
        uint64_t found = 0;
        for (int place = 0; place < num_inline(); place++) {
            const uint32_t slot = at(place);
            if (slot / 64 == index) found |= uint64_t{1} << slot % 64;
        }
        return found;
    }

    // Whether the slot has been added: not where it is there already, or where there is no memory.
    bool add(uint32_t slot) {
        if (has(slot)) return false;
        const int count = num_inline();
        if (empty() || (count && count < MAX_INLINE)) {
            word = (word & ~uint64_t{(1 << COUNT_BITS) - 1}) | static_cast<uint64_t>(count + 1) |
                   static_cast<uint64_t>(slot) << (COUNT_BITS + SLOT_BITS * count);
            return true;
        }
        Mask* set = widened(slot);
        if (set == nullptr) return false;
        set->words[slot / 64] |= uint64_t{1} << slot % 64;
        set->count++;
        word = reinterpret_cast<uint64_t>(set);
        return true;
    }

    // Whether the slot was there.
    bool remove(uint32_t slot) {
        if (!has(slot)) return false;
        if (Mask* set = mask()) {
            set->words[slot / 64] &= ~(uint64_t{1} << slot % 64);
            set->count--;
            if (set->count < MAX_INLINE) settle();
            return true;
        }
        uint32_t kept[MAX_INLINE] = {};
        int count = 0;
        for (int place = 0; place < num_inline(); place++) {
            if (at(place) != slot) kept[count++] = at(place);
        }
        write(kept, count);
        return true;
    }

    // Takes out all slots of `dead`, which has a bit for every slot.
    void remove_all(const uint64_t* dead) {
        if (Mask* set = mask()) {
            set->count = 0;
            for (uint32_t index = 0; index < set->num_words; index++) {
                set->words[index] &= ~dead[index];
                set->count += static_cast<uint32_t>(__builtin_popcountll(set->words[index]));
            }
            if (set->count < MAX_INLINE) settle();
            return;
        }
        uint32_t kept[MAX_INLINE] = {};
        int count = 0;
        for (int place = 0; place < num_inline(); place++) {
            const uint32_t slot = at(place);
            if (!(dead[slot / 64] >> slot % 64 & 1)) kept[count++] = slot;
        }
        if (count != num_inline()) write(kept, count);
    }

    void clear() {
        free(mask());
        word = 0;
    }

private:
    uint64_t word;

    void write(const uint32_t* slots, int count) {
        word = static_cast<uint64_t>(count);
        for (int place = 0; place < count; place++) word |= static_cast<uint64_t>(slots[place]) << (COUNT_BITS + SLOT_BITS * place);
    }

    // The set as a mask that has room for `slot`. Nothing where there is no memory: the set is as it was.
    Mask* widened(uint32_t slot) const {
        Mask* old = mask();
        if (old != nullptr && slot / 64 < old->num_words) return old;
        uint32_t highest = slot;
        for (int place = 0; place < num_inline(); place++) highest = at(place) > highest ? at(place) : highest;
        Mask* set = allocate_mask(highest / 64 + 1);
        if (set == nullptr) return nullptr;
        if (old != nullptr) {
            memcpy(set->words, old->words, old->num_words * sizeof(uint64_t));
            set->count = old->count;
            free(old);
            return set;
        }
        for (int place = 0; place < num_inline(); place++) set->words[at(place) / 64] |= uint64_t{1} << at(place) % 64;
        set->count = static_cast<uint32_t>(num_inline());
        return set;
    }

    // Puts the few slots that a mask still has in its place.
    void settle() {
        Mask* set = mask();
        uint32_t kept[MAX_INLINE] = {};
        int count = 0;
        for (uint32_t index = 0; index < set->num_words; index++) {
            for (uint64_t left = set->words[index]; left; left &= left - 1) kept[count++] = 64 * index + static_cast<uint32_t>(__builtin_ctzll(left));
        }
        free(set);
        write(kept, count);
    }
};

}  // namespace penstock
