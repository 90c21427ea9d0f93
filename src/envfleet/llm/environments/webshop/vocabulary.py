"""The words of generated products: what is sold, how it is praised, what can be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from envfleet.llm.environments.webshop.catalogue import BRANCH


@dataclass(frozen=True, slots=True)
class ProductKind:
    """One kind of product."""

    category: str
    query: str
    """The shop's name for the kind, in the plural."""
    path: str
    """Its place in the tree of categories."""
    nouns: tuple[str, ...]
    attributes: tuple[str, ...]
    choices: tuple[str, ...]
    """The options, as keys of CHOICES."""
    prices: tuple[float, float]


def _kind(
    category: str,
    query: str,
    path: str,
    nouns: str,
    attributes: str,
    choices: str,
    prices: tuple[float, float],
) -> ProductKind:
    return ProductKind(
        category,
        query,
        path.replace(" > ", BRANCH),
        _split(nouns),
        _split(attributes),
        _split(choices),
        prices,
    )


def _split(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(",") if word.strip())


_CARE = (
    "cruelty free, paraben free, sulfate free, fragrance free, long lasting, dermatologist tested, "
    "easy to apply, travel size, alcohol free, non toxic"
)
_FOOD = (
    "gluten free, non gmo, dairy free, soy free, low sugar, high protein, plant based, kosher "
    "certified, artificial flavors free, nut free, ready to eat, keto friendly"
)
_TECH = (
    "easy to install, high speed, plug and play, fast charging, noise cancelling, water resistant, "
    "ultra slim, high resolution, hands free, long battery life"
)
_HOME = (
    "easy to clean, easy assemble, solid wood, space saving, heavy duty, eco friendly, scratch "
    "resistant, mid century, stainless steel, spot clean"
)
_WEAR = (
    "machine wash, hand wash, slim fit, relaxed fit, moisture wicking, long sleeve, quick drying, "
    "elastic waist, high waist, tumble dry, wrinkle resistant"
)

KINDS: tuple[ProductKind, ...] = (
    _kind("beauty", "lip balms", "Beauty & Personal Care > Makeup > Lips > Lip Care Products",
          "balm, lip butter, lip mask", f"{_CARE}, seed oil, natural ingredients",
          "scent, size/pack", (3, 25)),
    _kind("beauty", "shampoos", "Beauty & Personal Care > Hair Care > Shampoo & Conditioner",
          "shampoo, cleansing bar, wash", f"{_CARE}, tea tree, coconut oil, damaged hair",
          "scent, size/pack", (6, 60)),
    _kind("beauty", "makeup brushes", "Beauty & Personal Care > Tools & Accessories > Brushes",
          "brush, brush set, powder brush", f"{_CARE}, synthetic hair, rose gold, easy carry",
          "color, style", (5, 45)),
    _kind("beauty", "body lotions", "Beauty & Personal Care > Skin Care > Body > Moisturizers",
          "lotion, body cream, moisturizer", f"{_CARE}, hyaluronic acid, sensitive skin, dry skin",
          "scent, size/pack", (5, 70)),
    _kind("beauty", "nail polishes", "Beauty & Personal Care > Foot, Hand & Nail Care > Polish",
          "polish, gel polish, lacquer", f"{_CARE}, quick drying, high gloss", "color", (3, 30)),
    _kind("fashion", "dress shirts", "Clothing, Shoes & Jewelry > Men > Clothing > Shirts",
          "shirt, oxford shirt, button down", f"{_WEAR}, cotton spandex, regular fit",
          "size, color, fit type", (15, 90)),
    _kind("fashion", "dresses", "Clothing, Shoes & Jewelry > Women > Clothing > Dresses",
          "dress, maxi dress, wrap dress", f"{_WEAR}, polyester spandex, drawstring closure",
          "size, color", (12, 120)),
    _kind("fashion", "hiking boots", "Clothing, Shoes & Jewelry > Men > Shoes > Outdoor > Hiking",
          "boot, hiking boot, trail boot", "rubber sole, anti slip, arch support, lace closure, "
          "water resistant, steel toe, slip resistant, memory foam", "shoe size, color", (30, 220)),
    _kind("fashion", "leggings", "Clothing, Shoes & Jewelry > Women > Clothing > Leggings",
          "leggings, yoga pants, tights", f"{_WEAR}, tummy control, nylon spandex",
          "size, color", (9, 70)),
    _kind("fashion", "sweaters", "Clothing, Shoes & Jewelry > Women > Clothing > Sweaters",
          "sweater, cardigan, pullover", f"{_WEAR}, soft acrylic, button closure",
          "size, color", (15, 130)),
    _kind("garden", "console tables", "Home & Kitchen > Furniture > Living Room > Sofa Tables",
          "console table, entry table, sofa table", f"{_HOME}, storage space, white finish",
          "color, size/flat", (60, 900)),
    _kind("garden", "throw pillows", "Home & Kitchen > Bedding > Decorative Pillows",
          "pillow, pillow cover, cushion", "machine washable, double sided, super soft, "
          "eco friendly, living room, exquisite workmanship, faux leather",
          "size/flat, color", (6, 60)),
    _kind("garden", "area rugs", "Home & Kitchen > Home Décor > Area Rugs & Pads",
          "rug, runner, carpet", "non slip, easy to clean, spot clean, stain resistant, dining "
          "room, living room, low pile", "size/flat, color, item shape", (25, 600)),
    _kind("garden", "office chairs", "Home & Kitchen > Furniture > Home Office > Chairs",
          "chair, desk chair, task chair", f"{_HOME}, lumbar support, height adjustable, pu "
          "leather", "color, style", (60, 480)),
    _kind("garden", "curtains", "Home & Kitchen > Window Treatments > Curtains & Drapes",
          "curtain, drape, window panel", "machine washable, energy saving, blackout lining, "
          "easy to install, living room, white item", "size/flat, color", (12, 140)),
    _kind("grocery", "protein bars", "Grocery & Gourmet Food > Snack Foods > Bars > Protein",
          "bar, snack bar, protein bar", _FOOD, "flavor name, size/pack", (6, 60)),
    _kind("grocery", "ground coffees", "Grocery & Gourmet Food > Beverages > Coffee > Ground",
          "coffee, dark roast, blend", f"{_FOOD}, usda organic, caffeine free",
          "flavor name, size/pack", (6, 70)),
    _kind("grocery", "herbal teas", "Grocery & Gourmet Food > Beverages > Tea > Herbal",
          "tea, infusion, tea bags", f"{_FOOD}, usda organic, individually wrapped",
          "flavor name, size/pack", (4, 45)),
    _kind("grocery", "granolas", "Grocery & Gourmet Food > Breakfast Foods > Cereals > Granola",
          "granola, cereal, clusters", f"{_FOOD}, whole grain", "flavor name, size/pack", (4, 50)),
    _kind("electronics", "headphones", "Electronics > Headphones > Over-Ear Headphones",
          "headphones, headset, earphones", f"{_TECH}, stereo sound, carrying case",
          "color, style", (15, 380)),
    _kind("electronics", "phone cases", "Cell Phones & Accessories > Cases, Holsters & Sleeves",
          "case, cover, bumper", "wireless charging, tempered glass, shock proof, case cover, "
          "easy to use, dust proof, glass screen", "color, size/fits", (5, 50)),
    _kind("electronics", "hdmi cables", "Electronics > Television & Video > HDMI Cables",
          "cable, cord, adapter cable", f"{_TECH}, gold plated, high definition, blu ray",
          "size/long, style", (4, 60)),
    _kind("electronics", "desktop computers", "Electronics > Computers & Tablets > Desktops",
          "desktop, tower, mini computer", f"{_TECH}, core i5, intel core, quad core",
          "capacity, style", (180, 2400)),
    _kind("electronics", "smartwatch bands", "Cell Phones & Accessories > Wearables > Bands",
          "band, strap, loop", "quick release, stainless steel, easy to adjust, sweat resistant, "
          "water resistant, long lasting", "color, size/fits", (5, 60)),
)  # fmt: skip

# What stands before a slash is the name of the choice; the rest tells choices of one name apart.
CHOICES: dict[str, tuple[str, ...]] = {
    "color": _split(
        "Black, White, Navy Blue, Light Blue, Forest Green, Wine Red, Dusty Pink, Heather Gray, "
        "Dark Brown, Khaki, Ivory, Lavender, Mustard Yellow, Burnt Orange, Teal, Charcoal, Rose "
        "Gold, Black/White, Coffee, Turquoise"
    ),
    "size": _split("X-Small, Small, Medium, Large, X-Large, XX-Large, 3X-Large, One Size"),
    "size/pack": _split(
        "2 Pack, 6 Pack, 8 Ounce (Pack of 1), 12 Ounce (Pack of 2), 16 Ounce, 1.5 Pound, 24 Count"
    ),
    "size/flat": _split("16x20 inch, 18x18 inch, 24x36 inch, 2 x 8 feet, 5 x 7 feet, 9 x 12 feet"),
    "size/long": _split("3 feet, 6 feet, 10 feet, 15 feet, 25 feet, 50 feet"),
    "size/fits": _split("38mm | 40mm, 42mm | 44mm, Standard, Plus, Pro Max, Mini"),
    "shoe size": _split("7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5, 11, 12 Wide, 13"),
    "fit type": _split("Men, Women, Youth, Tall"),
    "style": _split("Classic, Modern, Deluxe, Compact, Set of 4, With Case, Rustic, Professional"),
    "scent": _split("Vanilla, Lavender, Citrus, Unscented, Sandalwood, Ocean Breeze, Green Tea"),
    "flavor name": _split(
        "Dark Chocolate, Salted Caramel, Vanilla Bean, Peanut Butter, Mixed Berry, Cinnamon, "
        "Lemon Ginger, Hazelnut, Maple, Original"
    ),
    "item shape": _split("Rectangular, Round, Runner, Square"),
    "capacity": _split("8GB RAM/256GB SSD, 16GB RAM/512GB SSD, 16GB RAM/1TB SSD, 32GB RAM/2TB SSD"),
}

SYLLABLES = _split(
    "ba, bel, bor, cal, cor, da, del, dor, el, fa, fen, gal, gra, ha, hol, in, jo, ka, kel, la, "
    "lin, lor, ma, mer, mi, na, nor, o, pa, pel, qui, ra, ren, sa, sol, ta, tor, u, va, vel, wa, "
    "win, xa, yo, zen"
)
PRAISE = _split(
    "Premium, Everyday, Handmade, Improved, Signature, Essential, Portable, Luxury, Simple, "
    "Reliable, Vintage, Lightweight, Original, Durable, Elegant"
)
OCCASIONS = _split(
    "home, office, travel, outdoor trips, small apartments, birthdays, camping, daily use, "
    "students, weddings, guests, winter, summer, the gym, beginners, professionals"
)
SENTENCES = (
    "This {noun} by {brand} is made for {occasion}.",
    "You get a {praise} {noun} that is {first} and {second}.",
    "Our {query} are checked by hand before they leave the workshop in {town}.",
    "It makes a good present for {occasion}, and it is {first}.",
    "The {noun} comes with a {months} month warranty and a booklet on its care.",
    "Customers of {brand} praise how {second} it is.",
    "Keep it in a dry place, and write to {brand} if anything is missing.",
    "Designed in {town} since {year}, with {occasion} in mind.",
    "Weight {weight} ounces, model {model}.",
)
BULLETS = (
    "{first}: our {noun} keeps its promise for {occasion}",
    "{second} and {third}, tested {months} times",
    "Suits {occasion}, and fits most {query}",
    "Model {model}, about {weight} ounces",
    "From {town}: {brand} answers within a day",
)
ASKED = (
    "i am looking for {query} that are {attributes}{options}",
    "i need {attributes} {query}{options}",
    "can you find me a {noun} which is {attributes}{options}",
    "i want to buy {query} by somebody careful, {attributes}{options}",
)
