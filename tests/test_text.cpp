// core/text.h: numbers as text and back; core/checksum.h.
#include <gtest/gtest.h>

#include <cmath>

#include "core/checksum.h"
#include "core/text.h"

namespace tandem::test {
namespace {

TEST(Text, NumbersInTheirForms) {
  EXPECT_EQ(digits(0.1), "0.1");
  EXPECT_EQ(digits(1e-5), "1e-05");
  EXPECT_EQ(digits(1.0 / 3, 4), "0.3333");
  for (const double v : {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308}) EXPECT_EQ(parsed<double>(digits(v, 17)), v);
  EXPECT_EQ(short_number(21500), "21.5k");
  EXPECT_EQ(short_number(0.32998), "0.33");
  EXPECT_EQ(short_number(NAN), "–");
  EXPECT_EQ(short_number(5000, 3), "5k");
  EXPECT_EQ(short_number(2500, 3), "2.5k");
  EXPECT_EQ(short_number(999, 3), "999");
  EXPECT_EQ(short_number(1.2e-6), "1.2e-6");
  EXPECT_EQ(short_number(1e-100), "1e-100");
  EXPECT_EQ(readable_bytes(0), "0 B");
  EXPECT_EQ(readable_bytes(1536), "1.50 KiB");
  EXPECT_EQ(readable_bytes(11.5 * (1 << 20)), "11.5 MiB");
  EXPECT_EQ(readable_bytes(400.0 * (1 << 30)), "400 GiB");
  EXPECT_EQ(hex(std::uint64_t{0xab}), "00000000000000ab");
  EXPECT_EQ(hex(std::string("\x00\xff", 2)), "00ff");
  EXPECT_EQ(shell_quoted("it's"), R"('it'\''s')");
  EXPECT_EQ(printed("%s %d", std::string(1000, 'x').c_str(), 7), std::string(1000, 'x') + " 7");
}

TEST(Text, OnlyTheWholeTextIsANumber) {
  EXPECT_EQ(parsed<int>("-12"), -12);
  EXPECT_EQ(parsed<double>("2e3"), 2000);
  for (const char* text : {"", " 1", "1 ", "1x", "0x1", "99999999999"}) EXPECT_FALSE(parsed<int>(text)) << text;
  EXPECT_FALSE(parsed<std::uint64_t>("-1"));
  EXPECT_FALSE(parsed<double>("1,5"));
}

// Every bit counts, and where a text ends; the value itself stands in files.
TEST(Checksum, SeesEveryBitAndStaysAsItIs) {
  auto of = [](std::string_view a, std::string_view b = {}) {
    Checksum sum;
    sum.add(a);
    sum.add(b);
    return sum.value();
  };
  const std::string text = "nineteen bytes here";
  for (std::size_t i = 0; i < text.size(); i++)
    for (int bit = 0; bit < 8; bit++) {
      std::string other = text;
      other[i] = char(other[i] ^ 1 << bit);
      EXPECT_NE(of(text), of(other));
    }
  EXPECT_NE(of("ab", "c"), of("a", "bc"));
  EXPECT_NE(of("a"), of(std::string_view("a\0", 2)));
  EXPECT_EQ(hex(of(text)), "7619992327091435");
}

}  // namespace
}  // namespace tandem::test
