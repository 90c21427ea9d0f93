"""Word problems of things that are counted, in whole numbers."""

from __future__ import annotations

from envfleet.llm.environments.problems.story import (
    BAKED,
    BOUGHT,
    KEPT,
    PEOPLE,
    Draw,
    Story,
    Template,
    Thing,
)


def together(draw: Draw, story: Story) -> None:
    """One sum."""
    (a, b), thing = draw.some(PEOPLE, 2), draw.one_of(KEPT)
    of_a, of_b = draw.whole(1, 60), draw.whole(2, 60)
    story.tell(
        f"{a.name} has {thing(of_a)} and {b.name} has {thing(of_b)}.",
        f"How many {thing.many} do they have together?",
    )
    story.work(f"Together they have {{}} {thing.many}.", of_a, "+", of_b)


def how_many_more(draw: Draw, story: Story) -> None:
    """One difference."""
    (a, b), thing = draw.some(PEOPLE, 2), draw.one_of(KEPT)
    of_b = draw.whole(1, 50)
    of_a = of_b + draw.whole(2, 40)
    story.tell(
        f"{a.name} has collected {thing(of_a)}, and {b.name} has collected {thing(of_b)}.",
        f"How many more {thing.many} than {b.name} does {a.name} have?",
    )
    story.work(f"{a.name} has {{}} more {thing.many}.", of_a, "-", of_b)


def parcels(draw: Draw, story: Story) -> None:
    """One product."""
    who, thing = draw.one_of(PEOPLE), draw.one_of(BOUGHT)
    num_parcels, each = draw.whole(2, 12), draw.whole(3, 25)
    story.tell(
        f"{who.name} unpacks {num_parcels} parcels.",
        f"In each parcel there are {thing(each)}.",
        f"How many {thing.many} are there in all?",
    )
    story.work(f"There are {{}} {thing.many}.", num_parcels, "*", each)


def equal_shares(draw: Draw, story: Story) -> None:
    """One division."""
    thing = draw.one_of(BAKED)
    children, each = draw.whole(3, 12), draw.whole(2, 15)
    story.tell(
        f"{thing(children * each)} are shared equally among {children} children.",
        f"How many {thing.many} does each child get?",
    )
    story.work(f"Each child gets {{}} {thing.many}.", children * each, "/", children)


def shares_of_the_rest(draw: Draw, story: Story) -> None:
    """A difference, then a division."""
    who, thing = draw.one_of(PEOPLE), draw.one_of(BAKED)
    friends, each, eaten = draw.whole(2, 9), draw.whole(2, 12), draw.whole(1, 8)
    baked = friends * each + eaten
    story.tell(
        f"{who.name} bakes {thing(baked)}.",
        f"{who.They} keeps {thing(eaten)} for {who.their} family and shares the rest equally "
        f"among {friends} friends.",
        f"How many {thing.many} does each friend get?",
    )
    rest = story.work(f"To share there are {{}} {thing.many}.", baked, "-", eaten)
    story.work(f"Each friend gets {{}} {thing.many}.", rest, "/", friends)


def times_as_many(draw: Draw, story: Story) -> None:
    """A product, then a sum."""
    (a, b), thing = draw.some(PEOPLE, 2), draw.one_of(KEPT)
    of_a, times = draw.whole(3, 30), draw.whole(2, 6)
    story.tell(
        f"{a.name} has {thing(of_a)}.",
        f"{b.name} has {times} times as many {thing.many} as {a.name}.",
        f"How many {thing.many} do they have together?",
    )
    of_b = story.work(f"{b.name} has {{}} {thing.many}.", of_a, "*", times)
    story.work(f"Together they have {{}} {thing.many}.", of_a, "+", of_b)


def gives_and_buys(draw: Draw, story: Story) -> None:
    """A difference, a product and a sum."""
    (a, b), thing = draw.some(PEOPLE, 2), draw.one_of(KEPT)
    at_first, bags, each = draw.whole(15, 60), draw.whole(2, 6), draw.whole(3, 12)
    given = draw.whole(1, at_first - 5)
    story.tell(
        f"{a.name} has {thing(at_first)}.",
        f"{a.They} gives {thing(given)} to {b.name}, and then buys {bags} bags with "
        f"{thing(each)} in each.",
        f"How many {thing.many} does {a.name} have now?",
    )
    left = story.work(f"After the gift {a.name} has {{}} {thing.many}.", at_first, "-", given)
    bought = story.work(f"In the bags there are {{}} {thing.many}.", bags, "*", each)
    story.work(f"Now {a.name} has {{}} {thing.many}.", left, "+", bought)


def free_chairs(draw: Draw, story: Story) -> None:
    """A product and two differences."""
    rows, each = draw.whole(6, 20), draw.whole(8, 20)
    broken = draw.whole(1, 12)
    guests = draw.whole(10, rows * each - broken - 2)
    chair = Thing("chair", "chairs")
    are = "is" if broken == 1 else "are"
    story.tell(
        f"A hall has {rows} rows with {chair(each)} in each.",
        f"{chair(broken)} {are} broken and cannot be used, and {guests} guests have taken a seat.",
        "How many chairs are still free?",
    )
    chairs = story.work("There are {} chairs.", rows, "*", each)
    usable = story.work("Of them {} can be used.", chairs, "-", broken)
    story.work("Still free are {} chairs.", usable, "-", guests)


def legs(draw: Draw, story: Story) -> None:
    """Two products and a sum."""
    bird = draw.one_of((Thing("hen", "hens"), Thing("duck", "ducks"), Thing("goose", "geese")))
    beast = draw.one_of((Thing("cow", "cows"), Thing("sheep", "sheep"), Thing("pony", "ponies")))
    birds, beasts = draw.whole(2, 30), draw.whole(2, 20)
    story.tell(
        f"On a farm there are {bird(birds)} and {beast(beasts)}.",
        f"A {bird.one} has 2 legs and a {beast.one} has 4 legs.",
        "How many legs do all these animals have?",
    )
    of_birds = story.work(f"The {bird.many} have {{}} legs.", birds, "*", 2)
    of_beasts = story.work(f"The {beast.many} have {{}} legs.", beasts, "*", 4)
    story.work("Together they have {} legs.", of_birds, "+", of_beasts)


def pages_left(draw: Draw, story: Story) -> None:
    """A product, then a difference."""
    who = draw.one_of(PEOPLE)
    daily, days = draw.whole(8, 35), draw.whole(3, 9)
    pages = daily * days + draw.whole(5, 150)
    story.tell(
        f"{who.name} is reading a book of {pages} pages.",
        f"{who.They} has read {daily} pages a day for {days} days.",
        "How many pages are left?",
    )
    read = story.work(f"{who.name} has read {{}} pages.", daily, "*", days)
    story.work("There are {} pages left.", pages, "-", read)


def bus_stops(draw: Draw, story: Story) -> None:
    """A difference and a sum in one line, then a sum."""
    aboard = draw.whole(15, 45)
    off, on, more = draw.whole(2, 14), draw.whole(2, 15), draw.whole(2, 9)
    story.tell(
        f"There are {aboard} passengers on a bus.",
        f"At the first stop {off} get off and {on} get on.",
        f"At the second stop {more} get on and nobody gets off.",
        "How many passengers are on the bus then?",
    )
    first = story.work("After the first stop there are {} passengers.", aboard, "-", off, "+", on)
    story.work("After the second stop there are {} passengers.", first, "+", more)


def steady_machine(draw: Draw, story: Story) -> None:
    """A division, then a product."""
    rate, minutes, later = draw.whole(2, 20), draw.whole(3, 12), draw.whole(15, 60)
    part = draw.one_of(("bolts", "bottle caps", "springs", "labels", "envelopes"))
    story.tell(
        f"A machine makes {rate * minutes} {part} in {minutes} minutes, always at the same speed.",
        f"How many {part} does it make in {later} minutes?",
    )
    each = story.work(f"In one minute it makes {{}} {part}.", rate * minutes, "/", minutes)
    story.work(f"In {later} minutes it makes {{}} {part}.", each, "*", later)


COUNTING: tuple[Template, ...] = (
    together, how_many_more, parcels, equal_shares, shares_of_the_rest, times_as_many,
    gives_and_buys, free_chairs, legs, pages_left, bus_stops, steady_machine,
)  # fmt: skip
