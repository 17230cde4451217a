// A map from block keys to their owners, in many small parts with open addressing.
//
// A part that is full is copied to a larger place, which takes microseconds; parts are of different sizes from the beginning, so that
// they are not all full at once. Keys are keyed hashes already: they are mixed only so that any of their bits would do.
#pragma once

#include <sys/mman.h>

#include "owners.hpp"

namespace penstock {

struct Key {
    uint64_t low, high;
    bool operator==(const Key& other) const { return low == other.low && high == other.high; }
};

inline Key read_key(const char* data) {
    Key key;
    memcpy(&key, data, sizeof(key));
    return key;
}

inline uint64_t mix(const Key& key) {
    uint64_t x = key.low ^ key.high * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 29;
}

// A place for a key; free where nobody owns it.
struct Cell {
    Key key;
    Owners owners;
};

constexpr int PART_BITS = 12, NUM_PARTS = 1 << PART_BITS;
constexpr double FIRST_CELLS = 8, GROWTH = 2;
constexpr size_t PAGE_BYTES = 1 << 12;
// From here on cells are mapped, and go back to the system one part at a time when they are given up: the allocator would keep them, and
// give back a hundred megabytes in one call later.
constexpr size_t MAPPED_BYTES = 2 * PAGE_BYTES;

// As many cells as are wanted, or as the pages hold that they take.
inline uint32_t fill_pages(uint32_t wanted) {
    const size_t bytes = wanted * sizeof(Cell);
    if (bytes < MAPPED_BYTES) return wanted;
    return static_cast<uint32_t>((bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES / sizeof(Cell));
}

inline Cell* allocate_cells(uint32_t capacity) {
    const size_t bytes = capacity * sizeof(Cell);
    if (bytes < MAPPED_BYTES) return static_cast<Cell*>(calloc(1, bytes));
    void* cells = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return cells == MAP_FAILED ? nullptr : static_cast<Cell*>(cells);
}

inline void free_cells(Cell* cells, uint32_t capacity) {
    const size_t bytes = capacity * sizeof(Cell);
    if (bytes < MAPPED_BYTES) {
        free(cells);
    } else {
        munmap(cells, bytes);
    }
}

// Cells from a key's home on, without a gap, up to the one that has it.
class Part {
public:
    uint32_t capacity, count;

    void begin(double stagger) { size = FIRST_CELLS * (1 + (GROWTH - 1) * stagger); }
    Cell* home(uint64_t hash) const { return cells + place(hash); }
    bool has_cells() const { return cells != nullptr; }

    Cell* find(const Key& key, uint64_t hash) const {
        if (!count) return nullptr;
        for (uint32_t at = place(hash);; at = next(at)) {
            if (cells[at].owners.empty()) return nullptr;
            if (cells[at].key == key) return &cells[at];
        }
    }

    // The key's cell, or a free one with the key in it, to be counted by `took` once it has an owner. Nothing where there is no memory.
    Cell* find_or_add(const Key& key, uint64_t hash, const uint64_t* dead) {
        if (5 * (count + 1) > 4 * capacity && !resize(size * (capacity ? GROWTH : 1), dead) && count + 1 >= capacity) return nullptr;
        uint32_t at = place(hash);
        while (!cells[at].owners.empty() && !(cells[at].key == key)) at = next(at);
        cells[at].key = key;
        return &cells[at];
    }

    void took() { count++; }

    // Closes the gap that a cell leaves whose last owner is gone.
    void drop(Cell* cell) {
        auto gap = static_cast<uint32_t>(cell - cells);
        for (uint32_t at = next(gap); !cells[at].owners.empty(); at = next(at)) {
            const uint32_t wanted = place(mix(cells[at].key));
            const bool must_stay = gap < at ? gap < wanted && wanted <= at : gap < wanted || wanted <= at;
            if (must_stay) continue;
            cells[gap] = cells[at];
            memset(static_cast<void*>(&cells[at]), 0, sizeof(Cell));
            gap = at;
        }
        count--;
    }

    // Takes out the dead, and gives back room that is not needed.
    void sweep(const uint64_t* dead) {
        if (!cells) return;
        bool has_gaps = false;
        uint32_t left = 0;
        for (uint32_t at = 0; at < capacity; at++) {
            if (cells[at].owners.empty()) continue;
            cells[at].owners.remove_all(dead);
            has_gaps |= cells[at].owners.empty();
            left += !cells[at].owners.empty();
        }
        count = left;
        if (has_gaps || is_sparse()) refit(dead);
    }

    bool is_sparse() const { return size > 2 * FIRST_CELLS && 10.0 * count < 3.0 * size; }

    // Copies the cells to a place of the right size; with gaps that runs of cells do not allow for, this must be done. Without memory
    // for it they are forgotten: knowing nothing is better than searching in vain.
    void refit(const uint64_t* dead) {
        double wanted = size;
        while (wanted > 2 * FIRST_CELLS && wanted / GROWTH * 0.7 > count) wanted /= GROWTH;
        if (!resize(wanted, dead)) clear();
    }

    void clear() {
        for (uint32_t at = 0; at < capacity; at++) cells[at].owners.clear();
        free_cells(cells, capacity);
        cells = nullptr;
        capacity = count = 0;
    }

    const Cell* begin_cells() const { return cells; }
    const Cell* end_cells() const { return cells + capacity; }

private:
    Cell* cells;
    double size;  // what `capacity` is the whole part of, once there are cells, and more where pages have room for it

    uint32_t place(uint64_t hash) const { return static_cast<uint32_t>((hash & 0xffffffffu) * capacity >> 32); }
    uint32_t next(uint32_t at) const { return at + 1 == capacity ? 0 : at + 1; }

    bool resize(double wanted, const uint64_t* dead) {
        const uint32_t more = fill_pages(static_cast<uint32_t>(wanted));
        Cell* made = allocate_cells(more);
        if (made == nullptr) return false;
        Cell* old = cells;
        const uint32_t before = capacity;
        cells = made;
        capacity = more;
        size = wanted;
        count = 0;
        for (uint32_t from = 0; from < before; from++) {
            if (!old[from].owners.empty()) old[from].owners.remove_all(dead);
            if (old[from].owners.empty()) continue;
            uint32_t at = place(mix(old[from].key));
            while (!cells[at].owners.empty()) at = next(at);
            cells[at] = old[from];
            count++;
        }
        if (old != nullptr) free_cells(old, before);
        return true;
    }
};

class Table {
public:
    bool begin() {
        parts = static_cast<Part*>(calloc(NUM_PARTS, sizeof(Part)));
        if (parts == nullptr) return false;
        for (int number = 0; number < NUM_PARTS; number++) parts[number].begin(static_cast<double>(number) / NUM_PARTS);
        return true;
    }

    void end() {
        for (int number = 0; number < NUM_PARTS; number++) parts[number].clear();
        free(parts);
    }

    Part& part(int number) const { return parts[number]; }
    Part& part_of(uint64_t hash) const { return parts[hash >> (64 - PART_BITS)]; }

    // Fetches the cells where the key would be. By loads, which nothing waits for: prefetches are dropped where an address has to be
    // translated first, as most of them have to be in a large table.
    void fetch(const Key& key) const {
        const uint64_t hash = mix(key);
        const Part& part = part_of(hash);
        if (!part.has_cells()) return;
        const Cell* home = part.home(hash);
        (void)*reinterpret_cast<const volatile uint64_t*>(&home->owners);
        const Cell* later = home + 64 / sizeof(Cell);
        (void)*reinterpret_cast<const volatile uint64_t*>(&(later < part.end_cells() ? later : home)->owners);
    }

    Cell* find(const Key& key) const {
        const uint64_t hash = mix(key);
        return part_of(hash).find(key, hash);
    }

    // Whether the slot owns the key now and did not before.
    bool add(const Key& key, uint32_t slot, const uint64_t* dead) const {
        const uint64_t hash = mix(key);
        Part& part = part_of(hash);
        Cell* cell = part.find_or_add(key, hash, dead);
        if (cell == nullptr) return false;
        const bool was_free = cell->owners.empty(), is_added = cell->owners.add(slot);
        if (was_free && is_added) part.took();
        return is_added;
    }

    void remove(const Key& key, uint32_t slot, const uint64_t* dead) const {
        const uint64_t hash = mix(key);
        Part& part = part_of(hash);
        Cell* cell = part.find(key, hash);
        if (cell == nullptr || !cell->owners.remove(slot) || !cell->owners.empty()) return;
        part.drop(cell);
        if (part.is_sparse()) part.refit(dead);
    }

private:
    Part* parts;
};

}  // namespace penstock
