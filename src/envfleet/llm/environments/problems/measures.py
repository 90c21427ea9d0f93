"""Word problems of money, time, distance and the like, in whole numbers."""

from __future__ import annotations

from envfleet.llm.environments.problems.story import BAKED, BOUGHT, PEOPLE, Draw, Story, Template


def change_from_a_note(draw: Draw, story: Story) -> None:
    """Two products, a sum and a difference."""
    who, (first, second) = draw.one_of(PEOPLE), draw.some(BOUGHT, 2)
    many, price = draw.whole(2, 6), draw.whole(2, 9)
    others, other_price = draw.whole(1, 5), draw.whole(1, 8)
    note = 50 if many * price + others * other_price < 50 else 100
    ending = " each" if others > 1 else ""
    story.tell(
        f"{who.name} buys {first(many)} for ${price} each and {second(others)} for "
        f"${other_price}{ending}.",
        f"{who.They} pays with a ${note} bill.",
        f"How many dollars does {who.name} get back?",
    )
    one = story.work(f"The {first.many} cost {{}} dollars.", many, "*", price)
    name = second.one if others == 1 else second.many
    cost = "costs" if others == 1 else "cost"
    other = story.work(f"The {name} {cost} {{}} dollars.", others, "*", other_price)
    total = story.work("All of it costs {} dollars.", one, "+", other)
    story.work(f"{who.name} gets back {{}} dollars.", note, "-", total)


def saving_up(draw: Draw, story: Story) -> None:
    """A difference, then a division."""
    who = draw.one_of(PEOPLE)
    wish = draw.one_of(("bicycle", "guitar", "tent", "camera", "pair of skates", "telescope"))
    weekly, weeks, saved = draw.whole(5, 20), draw.whole(3, 15), draw.whole(4, 60)
    story.tell(
        f"{who.name} wants to buy a {wish} that costs ${weekly * weeks + saved}.",
        f"{who.They} has ${saved} already and saves ${weekly} every week.",
        f"After how many weeks can {who.name} buy it?",
    )
    missing = story.work(f"{who.name} needs {{}} dollars more.", weekly * weeks + saved, "-", saved)
    story.work("That takes {} weeks.", missing, "/", weekly)


def two_legs_of_a_journey(draw: Draw, story: Story) -> None:
    """Two products and a sum."""
    what = draw.one_of(("train", "bus", "lorry", "coach"))
    fast, hours, slow, more = (
        draw.whole(14, 24) * 5,
        draw.whole(2, 5),
        draw.whole(6, 12) * 5,
        draw.whole(2, 4),
    )
    story.tell(
        f"A {what} travels for {hours} hours at {fast} kilometres per hour, and then for {more} "
        f"hours at {slow} kilometres per hour.",
        "How many kilometres does it travel in all?",
    )
    first = story.work("At first it travels {} kilometres.", hours, "*", fast)
    second = story.work("Then it travels {} kilometres.", more, "*", slow)
    story.work("In all it travels {} kilometres.", first, "+", second)


def ages(draw: Draw, story: Story) -> None:
    """A sum, a product and a sum of three."""
    a, b, c = draw.some(PEOPLE, 3)
    age, older, times = draw.whole(4, 14), draw.whole(2, 9), draw.whole(2, 3)
    story.tell(
        f"{a.name} is {age} years old.",
        f"{b.name} is {older} years older than {a.name}, and {c.name} is {times} times as old as "
        f"{b.name}.",
        "How old are the three of them together, in years?",
    )
    of_b = story.work(f"{b.name} is {{}} years old.", age, "+", older)
    of_c = story.work(f"{c.name} is {{}} years old.", of_b, "*", times)
    story.work("Together they are {} years old.", age, "+", of_b, "+", of_c)


def fence(draw: Draw, story: Story) -> None:
    """A sum and two products."""
    width, price = draw.whole(4, 30), draw.whole(3, 15)
    length = width + draw.whole(2, 20)
    story.tell(
        f"A rectangular garden is {length} metres long and {width} metres wide.",
        f"A fence around it, along 2 long and 2 short sides, costs ${price} per metre.",
        "How many dollars does the fence cost?",
    )
    half = story.work("One long and one short side measure {} metres.", length, "+", width)
    around = story.work("All the way around there are {} metres.", 2, "*", half)
    story.work("The fence costs {} dollars.", around, "*", price)


def seed_bed(draw: Draw, story: Story) -> None:
    """Two products."""
    width, seeds = draw.whole(2, 9), draw.whole(4, 25)
    length = width + draw.whole(1, 8)
    flower = draw.one_of(("poppy", "sunflower", "carrot", "lettuce", "radish"))
    story.tell(
        f"A rectangular bed is {length} metres long and {width} metres wide.",
        f"On every square metre {seeds} {flower} seeds are sown.",
        "How many seeds are needed?",
    )
    area = story.work("The bed has {} square metres.", length, "*", width)
    story.work("It needs {} seeds.", area, "*", seeds)


def wages(draw: Draw, story: Story) -> None:
    """Two products and a difference."""
    who = draw.one_of(PEOPLE)
    hours, rate, days = draw.whole(3, 8), draw.whole(9, 25), draw.whole(2, 6)
    fare = draw.whole(5, 45)
    story.tell(
        f"{who.name} works {hours} hours a day for ${rate} per hour.",
        f"In one week {who.they} works {days} days and spends ${fare} on bus fares.",
        f"How many dollars does {who.name} have left from that week's pay?",
    )
    daily = story.work(f"In a day {who.name} earns {{}} dollars.", hours, "*", rate)
    weekly = story.work(f"In that week {who.name} earns {{}} dollars.", daily, "*", days)
    story.work("After the fares {} dollars are left.", weekly, "-", fare)


def average_score(draw: Draw, story: Story) -> None:
    """A sum of four, then a division by their number."""
    who = draw.one_of(PEOPLE)
    average, up, down = draw.whole(20, 80), draw.whole(1, 12), draw.whole(1, 12)
    scores = (average + up, average - up, average + down, average - down)
    one, two, three, four = scores
    story.tell(
        f"In 4 rounds of a game {who.name} scores {one}, {two}, {three} and {four} points.",
        f"What is {who.their} average score per round?",
    )
    total = story.work(f"{who.name} scores {{}} points.", one, "+", two, "+", three, "+", four)
    story.work("The average is {} points.", total, "/", 4)


def price_cut(draw: Draw, story: Story) -> None:
    """Per cent of a price, and what is left of it."""
    what = draw.one_of(("coat", "lamp", "chair", "radio", "rucksack", "kettle"))
    percent = draw.one_of((5, 10, 15, 20, 25, 30, 40, 60))
    price = 20 * draw.whole(1, 12)  # so that every one of these per cent is a whole number
    story.tell(
        f"A {what} costs ${price}.",
        f"In a sale its price is cut by {percent} percent.",
        f"How many dollars does the {what} cost in the sale?",
    )
    cut = story.work("The price is cut by {} dollars.", price, "*", percent, "/", 100)
    story.work("In the sale it costs {} dollars.", price, "-", cut)


def bakery(draw: Draw, story: Story) -> None:
    """A product, a difference, a division and a product."""
    who, thing = draw.one_of(PEOPLE), draw.one_of(BAKED)
    box, num_boxes, price = draw.whole(3, 8), draw.whole(2, 9), draw.whole(4, 15)
    trays, each = draw.whole(2, 6), 0
    while trays * each <= box * num_boxes:
        each += draw.whole(4, 9)
    gone = trays * each - box * num_boxes
    were = "is" if gone == 1 else "are"
    story.tell(
        f"{who.name} bakes {trays} trays with {thing(each)} on each.",
        f"{thing(gone)} {were} eaten at once; the others are packed in boxes of {box}, and each "
        f"box is sold for ${price}.",
        f"How many dollars do all the boxes bring {who.name}?",
    )
    baked = story.work(f"{who.name} bakes {{}} {thing.many}.", trays, "*", each)
    left = story.work(f"To pack there are {{}} {thing.many}.", baked, "-", gone)
    packed = story.work("They fill {} boxes.", left, "/", box)
    story.work("The boxes bring {} dollars.", packed, "*", price)


def school_trip(draw: Draw, story: Story) -> None:
    """A sum, a product, a sum and a division."""
    pupils, teachers = draw.whole(12, 30), draw.whole(2, 4)
    ticket, share = draw.whole(3, 12), draw.whole(2, 9)
    coach = (pupils + teachers) * share
    where = draw.one_of(("museum", "zoo", "castle", "planetarium", "theatre"))
    story.tell(
        f"{pupils} pupils and {teachers} teachers visit a {where}.",
        f"A ticket costs ${ticket} per person, and the coach costs ${coach} for everybody.",
        "All of them share the whole cost equally.",
        "How many dollars does each person pay?",
    )
    people = story.work("There are {} people.", pupils, "+", teachers)
    tickets = story.work("Their tickets cost {} dollars.", people, "*", ticket)
    total = story.work("The whole trip costs {} dollars.", tickets, "+", coach)
    story.work("Each person pays {} dollars.", total, "/", people)


def temperature(draw: Draw, story: Story) -> None:
    """A sum and a difference around zero."""
    where = draw.one_of(("Oslo", "Quebec", "Sapporo", "Tartu", "Ulaanbaatar", "Innsbruck"))
    morning, up, down = -draw.whole(2, 15), draw.whole(3, 20), draw.whole(4, 20)
    story.tell(
        f"One morning in {where} it is {morning} degrees.",
        f"Until noon it gets {up} degrees warmer, and from noon to midnight {down} degrees colder.",
        "How many degrees is it at midnight?",
    )
    noon = story.work("At noon it is {} degrees.", morning, "+", up)
    story.work("At midnight it is {} degrees.", noon, "-", down)


MEASURES: tuple[Template, ...] = (
    change_from_a_note, saving_up, two_legs_of_a_journey, ages, fence, seed_bed, wages,
    average_score, price_cut, bakery, school_trip, temperature,
)  # fmt: skip
