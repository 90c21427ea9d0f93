"""Word problems whose numbers have decimals."""

from __future__ import annotations

from fractions import Fraction

from envfleet.llm.environments.problems.story import (
    BOUGHT,
    PEOPLE,
    SOLD_BY_WEIGHT,
    Draw,
    Story,
    Template,
    dollars,
)


def by_weight(draw: Draw, story: Story) -> None:
    """Two products and a sum."""
    who, (first, second) = draw.one_of(PEOPLE), draw.some(SOLD_BY_WEIGHT, 2)
    weight, price = draw.whole(2, 5), draw.cents(21, 79)
    more, other_price = draw.whole(2, 4), draw.cents(21, 99)
    story.tell(
        f"{who.name} buys {weight} kilograms of {first} at {dollars(price)} per kilogram and "
        f"{more} kilograms of {second} at {dollars(other_price)} per kilogram.",
        f"How many dollars does {who.name} pay?",
    )
    one = story.work(f"For the {first} {who.they} pays {{}} dollars.", weight, "*", price)
    other = story.work(f"For the {second} {who.they} pays {{}} dollars.", more, "*", other_price)
    story.work(f"In all {who.they} pays {{}} dollars.", one, "+", other)


def pieces_of_ribbon(draw: Draw, story: Story) -> None:
    """One division."""
    pieces, each = draw.whole(2, 9), draw.tenths(3, 38)
    what = draw.one_of(("ribbon", "rope", "wire", "string", "pipe"))
    story.tell(
        f"A {what} of {story.n(pieces * each)} metres is cut into {pieces} pieces of equal length.",
        "How many metres long is each piece?",
    )
    story.work("Each piece is {} metres long.", pieces * each, "/", pieces)


def fuel(draw: Draw, story: Story) -> None:
    """A division, then a product."""
    use, distance = draw.tenths(38, 92), draw.whole(2, 12) * 50
    who = draw.one_of(PEOPLE)
    story.tell(
        f"{who.name}'s car uses {story.n(use)} litres of fuel for 100 kilometres.",
        f"How many litres does it use for {distance} kilometres?",
    )
    times = story.work("The distance is {} times as long.", distance, "/", 100)
    story.work("The car uses {} litres.", use, "*", times)


def rainfall(draw: Draw, story: Story) -> None:
    """A sum of three, then a difference."""
    monday, tuesday, wednesday = (draw.tenths(11, 95) for _ in range(3))
    usual = monday + tuesday + wednesday - draw.tenths(1, int((monday + tuesday) * 10))
    story.tell(
        f"It rained {story.n(monday)} millimetres on Monday, {story.n(tuesday)} millimetres on "
        f"Tuesday and {story.n(wednesday)} millimetres on Wednesday.",
        f"Usually {story.n(usual)} millimetres fall in these three days.",
        "How many millimetres more than usual did it rain?",
    )
    total = story.work("It rained {} millimetres.", monday, "+", tuesday, "+", wednesday)
    story.work("That is {} millimetres more than usual.", total, "-", usual)


def coins_back(draw: Draw, story: Story) -> None:
    """A product, then a difference."""
    who, thing = draw.one_of(PEOPLE), draw.one_of(BOUGHT)
    count, price = draw.whole(2, 6), draw.cents(11, 65)
    note = 10 if count * price < 10 else 20
    story.tell(
        f"{who.name} buys {thing(count)} at {dollars(price)} each and pays with a ${note} bill.",
        f"How many dollars does {who.they} get back?",
    )
    cost = story.work(f"The {thing.many} cost {{}} dollars.", count, "*", price)
    story.work(f"{who.name} gets back {{}} dollars.", note, "-", cost)


def shared_bill(draw: Draw, story: Story) -> None:
    """A product, a sum and a division."""
    friends, price, drink = draw.whole(2, 6), Fraction(draw.whole(11, 39), 2), draw.cents(21, 99)
    story.tell(
        f"{friends} friends order {friends} dishes at {dollars(price)} each and drinks for "
        f"{dollars(friends * drink)} in all.",
        "They share the bill equally.",
        "How many dollars does each of them pay?",
    )
    food = story.work("The dishes cost {} dollars.", friends, "*", price)
    bill = story.work("The bill is {} dollars.", food, "+", friends * drink)
    story.work("Each of them pays {} dollars.", bill, "/", friends)


def training(draw: Draw, story: Story) -> None:
    """Two products, a sum and a difference."""
    who = draw.one_of(PEOPLE)
    short, days, long, more = (
        draw.tenths(21, 59),
        draw.whole(2, 4),
        draw.tenths(61, 99),
        draw.whole(2, 3),
    )
    ran = short * days + long * more
    goal = ran + draw.tenths(5, 60)
    story.tell(
        f"{who.name} wants to run {story.n(goal)} kilometres this week.",
        f"On {days} days {who.they} has run {story.n(short)} kilometres each, and on {more} days "
        f"{story.n(long)} kilometres each.",
        f"How many kilometres does {who.name} still have to run?",
    )
    first = story.work("The short runs come to {} kilometres.", short, "*", days)
    second = story.work("The long runs come to {} kilometres.", long, "*", more)
    total = story.work(f"{who.name} has run {{}} kilometres.", first, "+", second)
    story.work("There are {} kilometres to go.", goal, "-", total)


DECIMAL_NUMBERS: tuple[Template, ...] = (
    by_weight, pieces_of_ribbon, fuel, rainfall, coins_back, shared_bill, training,
)  # fmt: skip
