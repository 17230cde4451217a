// Which prediction a block at a replica rests on: a map from a key and an origin (one life of a replica's entries) to a number.
#pragma once

#include "table.hpp"

namespace penstock {

struct Stamp {
    Key key;
    uint32_t origin;  // 0: the place is free
    uint32_t number;
};

// Open addressing in a power of two of places, at most two thirds of them taken.
class Stamps {
public:
    uint32_t count;

    Stamp* find(const Key& key, uint32_t origin) const {
        if (!count) return nullptr;
        for (uint32_t at = home(key, origin);; at = (at + 1) & (capacity - 1)) {
            if (!places[at].origin) return nullptr;
            if (places[at].origin == origin && places[at].key == key) return &places[at];
        }
    }

    // Whether there was memory for it; the key has no stamp of this origin yet.
    bool add(const Key& key, uint32_t origin, uint32_t number) {
        if (3 * (count + 1) > 2 * capacity && !grow()) return false;
        put({key, origin, number});
        count++;
        return true;
    }

    void remove(Stamp* stamp) {
        auto gap = static_cast<uint32_t>(stamp - places);
        for (uint32_t at = (gap + 1) & (capacity - 1); places[at].origin; at = (at + 1) & (capacity - 1)) {
            const uint32_t wanted = home(places[at].key, places[at].origin);
            if (((at - wanted) & (capacity - 1)) < ((at - gap) & (capacity - 1))) continue;
            places[gap] = places[at];
            gap = at;
        }
        places[gap].origin = 0;
        count--;
    }

    const Stamp* begin() const { return places; }
    const Stamp* end() const { return places + capacity; }
    void clear() { free(places); }

private:
    Stamp* places;
    uint32_t capacity;

    uint32_t home(const Key& key, uint32_t origin) const {
        return static_cast<uint32_t>((mix(key) + origin * 0x9e3779b97f4a7c15u) >> 20) & (capacity - 1);
    }

    void put(const Stamp& stamp) {
        uint32_t at = home(stamp.key, stamp.origin);
        while (places[at].origin) at = (at + 1) & (capacity - 1);
        places[at] = stamp;
    }

    bool grow() {
        const uint32_t before = capacity, more = capacity ? 2 * capacity : 64;
        auto* made = static_cast<Stamp*>(calloc(more, sizeof(Stamp)));
        if (made == nullptr) return false;
        Stamp* old = places;
        places = made;
        capacity = more;
        for (uint32_t at = 0; at < before; at++) {
            if (old[at].origin) put(old[at]);
        }
        free(old);
        return true;
    }
};

}  // namespace penstock
