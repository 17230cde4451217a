// The choice of tokens: the portable level, and the C ABI.

#include "sampling/sampling.hpp"

#include "base/team.hpp"
#include "linear/linear.hpp"

#define PENSTOCK_LANES 4
#define PENSTOCK_LEVEL portable
#include "sampling/sampling_row.hpp"

namespace penstock {

int64_t choice_scratch_bytes(int64_t vocab) {
    const int64_t size = padded_vocab(vocab), floats = size + size / BLOCK;
    return size * static_cast<int64_t>(sizeof(Entry)) + (floats * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
}

ChooseRow* row_chooser() {
#if defined(__x86_64__)
    if (level() >= VNNI) return avx512::choose_row;
    if (level() >= AVX2) return avx2::choose_row;
#endif
    return portable::choose_row;
}

TakePart* part_taker() {
#if defined(__x86_64__)
    if (level() >= VNNI) return avx512::take_part;
    if (level() >= AVX2) return avx2::take_part;
#endif
    return portable::take_part;
}

int64_t end_draw(const PartDraw* draws, int64_t count, int64_t stride, float best) {
    double most = -__builtin_inf();
    int64_t place = 0;
    for (const PartDraw* draw = draws; draw < draws + count * stride; draw += stride)
        for (const NearBest* found = draw->near; found < draw->near + draw->count; found++) {
            const float scaled = (found->logit - best) / draw->temperature;
            const double score = static_cast<double>(scaled) + found->noise;
            if (score > most || (score == most && found->place < place)) most = score, place = found->place;
        }
    return place;
}

namespace {

struct Choices {
    ChoiceRow* rows;
    int64_t num_rows, vocab;
    char* scratch;
    ChooseRow* choose;
    Phase choosing;
};

void choose_some(void* context, int worker) {
    Choices& choices = *static_cast<Choices*>(context);
    void* scratch = choices.scratch + worker * choice_scratch_bytes(choices.vocab);
    share(choices.choosing, choices.num_rows, [&](int64_t row) { choices.choose(choices.rows[row], choices.vocab, scratch); });
}

}  // namespace
}  // namespace penstock

extern "C" {

// Scratch of one thread, a multiple of 64.
int64_t penstock_choice_scratch_bytes(int64_t vocab) { return penstock::choice_scratch_bytes(vocab); }

// Chooses in rows of logits; scratch: of as many threads, aligned to 64 bytes. vocab: below 2**19, for sums of weights to fit 63 bits.
void penstock_choose_rows(penstock::ChoiceRow* rows, int64_t num_rows, int64_t vocab, void* scratch, int32_t threads) {
    penstock::Choices choices = {rows, num_rows, vocab, static_cast<char*>(scratch), penstock::row_chooser(), {}};
    penstock::run_team(static_cast<int>(penstock::smaller(threads, num_rows)), penstock::choose_some, &choices);
}
}
