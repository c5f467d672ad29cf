// What a step reads and writes, passed over once: torch's own kernels would take several passes, one operation each.
//
// [Note: the same bits everywhere]
// Every element is computed by itself, by IEEE's rules and in the order that is written here: neither the number of threads nor
// what the compiler makes of a loop changes a bit. So nothing may be built with options that let it compute otherwise.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

namespace {

constexpr int64_t kBlock = 1024;  // elements that are worked on together: what is made of them stays in the nearest cache
constexpr int64_t kBlocksOfOne = 32;  // so many one thread has done before another one has begun

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Without a branch, which would keep a loop from being computed many elements at a time.
template <class Bits>
Bits chosen(bool first, Bits one, Bits other) {
  const Bits mask = Bits(0) - Bits(first);
  return (one & mask) | (other & ~mask);
}

struct BFloat16 {
  uint16_t bits;

  operator float() const { return bits_as<float>(uint32_t(bits) << 16); }

  static BFloat16 rounded(float value) {
    const uint32_t wide = bits_as<uint32_t>(value);
    const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
    return {uint16_t(is_nan ? 0x7fc0u : (wide + 0x7fffu + (wide >> 16 & 1u)) >> 16)};
  }
};

struct Half {
  uint16_t bits;

  operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = bits & 0x7c00u, fraction = bits & 0x3ffu;
    const uint32_t normal = ((exponent | fraction) << 13) + (chosen(exponent == 0x7c00u, 224u, 112u) << 23);
    const uint32_t small = bits_as<uint32_t>(float(int32_t(fraction)) * 0x1p-24f);
    return bits_as<float>(sign | chosen(exponent == 0, small, normal));
  }

  static Half rounded(float value) {
    const uint32_t whole = bits_as<uint32_t>(value), sign = whole >> 16 & 0x8000u, wide = whole & 0x7fffffffu;
    const uint32_t normal = (wide + 0xfffu + (wide >> 13 & 1u) - (112u << 23)) >> 13;
    // The last bit of a number from a half to one is worth as much as that of the smallest halves: the sum rounds as these do.
    const uint32_t small = bits_as<uint32_t>(bits_as<float>(wide) + 0.5f) - bits_as<uint32_t>(0.5f);
    const uint32_t finite = wide < 0x38800000u ? small : normal;
    const uint32_t special = wide > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return {uint16_t(sign | (wide >= 0x477ff000u ? special : finite))};
  }
};

uint16_t bits_of(BFloat16 value) { return value.bits; }
uint16_t bits_of(Half value) { return value.bits; }
uint32_t bits_of(float value) { return bits_as<uint32_t>(value); }
uint64_t bits_of(double value) { return bits_as<uint64_t>(value); }

template <class Stored, class Total>
Stored narrowed(Total value) {
  if constexpr (std::is_arithmetic_v<Stored>) {
    return Stored(value);
  } else {
    return Stored::rounded(float(value));
  }
}

// As native.py numbers them.
template <class Act>
void with_dtype(int dtype, Act act) {
  switch (dtype) {
    case 0: return act(float());
    case 1: return act(double());
    case 2: return act(BFloat16());
    case 3: return act(Half());
  }
}

template <class Total>
bool is_of(int dtype) {
  return dtype == (sizeof(Total) == 4 ? 0 : 1);
}

struct Stretch {
  int64_t begin, length;
};

int64_t num_blocks(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

template <class Act>
void for_each_block(int64_t numel, int num_threads, Act act) {
  const int64_t number = num_blocks(numel);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (number > kBlocksOfOne)
  for (int64_t block = 0; block < number; block++) {
    const int64_t begin = block * kBlock;
    act(block, Stretch{begin, std::min(kBlock, numel - begin)});
  }
}

// What ranks sent, side by side, and what their sum is multiplied by, one after the other.
struct Rows {
  const void* const* rows;
  int number, dtype;
  const double* factors;
  int num_factors;

  // Where the sum of a stretch is: in `total`, unless it is there as it is.
  template <class Total>
  const Total* added_up(Stretch there, Total* total) const {
    const bool is_there = number == 1 && num_factors == 0 && is_of<Total>(dtype);
    if (is_there) return static_cast<const Total*>(rows[0]) + there.begin;
    add_up(there, total);
    return total;
  }

 private:
  template <class Total>
  void add_up(Stretch there, Total* __restrict total) const {
    with_dtype(dtype, [&](auto example) {
      using Stored = decltype(example);
      for (int at = 0; at < number; at++) {
        const Stored* __restrict row = static_cast<const Stored*>(rows[at]) + there.begin;
        if (at == 0) {
          for (int64_t i = 0; i < there.length; i++) total[i] = Total(row[i]);
        } else {
          for (int64_t i = 0; i < there.length; i++) total[i] += Total(row[i]);
        }
      }
    });
    for (int at = 0; at < num_factors; at++) {
      const Total factor = Total(factors[at]);
      for (int64_t i = 0; i < there.length; i++) total[i] *= factor;
    }
  }
};

template <class Total>
void add(Rows rows, Total* target, int64_t numel, bool adds, int num_threads) {
  for_each_block(numel, num_threads, [=](int64_t, Stretch there) {
    alignas(64) Total place[kBlock];
    Total* own = target + there.begin;  // where a row may lie too
    const Total* total = rows.added_up(there, place);
    for (int64_t i = 0; i < there.length; i++) own[i] = adds ? own[i] + total[i] : total[i];
  });
}

template <class Lane, class Total>
double sum_of_squares(const Total* total, int64_t length) {
  constexpr int kLanes = 64;  // sums side by side, so that none waits for the other
  Lane lanes[kLanes] = {};
  const int64_t whole = length - length % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; lane++) lanes[lane] += Lane(total[i + lane]) * Lane(total[i + lane]);
  }
  for (int64_t i = whole; i < length; i++) lanes[i - whole] += Lane(total[i]) * Lane(total[i]);
  double sum = 0.0;
  for (Lane lane : lanes) sum += double(lane);
  return sum;
}

template <class Total>
double square(Rows rows, int64_t numel, double* squares, int num_threads) {
  for_each_block(numel, num_threads, [=](int64_t block, Stretch there) {
    alignas(64) Total place[kBlock];
    const Total* total = rows.added_up(there, place);
    const double sum = sum_of_squares<Total>(total, there.length);
    const bool is_safe = sum > 0x1p-80 && std::isfinite(sum);  // or else some square may be no number of that size any more
    squares[block] = is_safe ? sum : sum_of_squares<double>(total, there.length);
  });
  return std::accumulate(squares, squares + num_blocks(numel), 0.0);
}

// Of a step of Adam, in the order that compiled_adam.py gives them. What is mixed is computed from where it is nearer to, as torch
// does it: a mean that counts nothing leaves nothing of itself.
template <class Total>
struct Numbers {
  bool nearer_to_slope;
  Total kept, mixed, old_square, new_square, rate, inverse_root, eps;

  explicit Numbers(const double* given)
      : nearer_to_slope(given[1] >= 0.5), kept(given[0]), mixed(nearer_to_slope ? given[1] - 1.0 : given[1]),
        old_square(given[2]), new_square(given[3]), rate(given[4]), inverse_root(given[5]), eps(given[6]) {}
};

template <bool decoupled, class Total>
void adam(Numbers<Total> by, const Total* __restrict slopes, Total* __restrict masters, Total* __restrict means,
          Total* __restrict squares, int64_t length) {
  for (int64_t i = 0; i < length; i++) {
    Total value = masters[i], slope = slopes[i];
    if (decoupled) {
      value *= by.kept;
    } else {
      slope += value * by.kept;
    }
    const Total mean = (by.nearer_to_slope ? slope : means[i]) + (slope - means[i]) * by.mixed;
    const Total square = squares[i] * by.old_square + by.new_square * slope * slope;  // as torch: the square alone overflows
    means[i] = mean;
    squares[i] = square;
    masters[i] = value + by.rate * (mean / (std::sqrt(square) * by.inverse_root + by.eps));
  }
}

// An edit is where a weight has other bits than its rounded master.
template <class Total>
void adopt(const void* weights, int dtype, Stretch there, Total* __restrict masters) {
  with_dtype(dtype, [&](auto example) {
    using Stored = decltype(example);
    const Stored* __restrict own = static_cast<const Stored*>(weights) + there.begin;
    for (int64_t i = 0; i < there.length; i++) {
      const bool is_edited = bits_of(narrowed<Stored>(masters[i])) != bits_of(own[i]);
      masters[i] = bits_as<Total>(chosen(is_edited, bits_of(Total(own[i])), bits_of(masters[i])));
    }
  });
}

template <class Total>
void round_to(void* rounded, int dtype, Stretch there, const Total* __restrict masters) {
  with_dtype(dtype, [&](auto example) {
    using Stored = decltype(example);
    Stored* __restrict own = static_cast<Stored*>(rounded) + there.begin;
    for (int64_t i = 0; i < there.length; i++) own[i] = narrowed<Stored>(masters[i]);
  });
}

template <class Total>
void step(const double* numbers, bool decoupled, Rows rows, Total* masters, Total* means, Total* squares, const void* weights,
          int weights_dtype, void* rounded, int rounded_dtype, int64_t numel, int num_threads) {
  const Numbers<Total> by(numbers);
  for_each_block(numel, num_threads, [=](int64_t, Stretch there) {
    alignas(64) Total place[kBlock];
    Total *own = masters + there.begin, *mean = means + there.begin, *square = squares + there.begin;
    const Total* slopes = rows.added_up(there, place);
    if (weights) adopt(weights, weights_dtype, there, own);
    if (decoupled) {
      adam<true>(by, slopes, own, mean, square, there.length);
    } else {
      adam<false>(by, slopes, own, mean, square, there.length);
    }
    if (rounded) round_to(rounded, rounded_dtype, there, own);
  });
}

}  // namespace

// As native.py declares them.
extern "C" {

void zero_add(int total, Rows rows, void* target, int64_t numel, int adds, int num_threads) {
  if (total == 0) return add(rows, static_cast<float*>(target), numel, adds != 0, num_threads);
  add(rows, static_cast<double*>(target), numel, adds != 0, num_threads);
}

int64_t zero_num_blocks(int64_t numel) { return num_blocks(numel); }

// `squares` is scratch memory, a number for each block.
double zero_square(int total, Rows rows, int64_t numel, double* squares, int num_threads) {
  return total == 0 ? square<float>(rows, numel, squares, num_threads) : square<double>(rows, numel, squares, num_threads);
}

void zero_step(int total, const double* numbers, int decoupled, Rows rows, void* masters, void* means, void* squares,
               const void* weights, int weights_dtype, void* rounded, int rounded_dtype, int64_t numel, int num_threads) {
  const auto go = [&](auto example) {
    using Total = decltype(example);
    step(numbers, decoupled != 0, rows, static_cast<Total*>(masters), static_cast<Total*>(means), static_cast<Total*>(squares),
         weights, weights_dtype, rounded, rounded_dtype, numel, num_threads);
  };
  total == 0 ? go(float()) : go(double());
}

}
