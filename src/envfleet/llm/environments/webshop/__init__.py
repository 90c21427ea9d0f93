"""WebShop: find a product in a shop by text commands, and buy it."""

from envfleet.llm.environments.webshop.config import WebShopConfig, prepare_catalogue
from envfleet.llm.environments.webshop.env import WebShopEnv
from envfleet.llm.environments.webshop.generator import write_catalogue

__all__ = ["WebShopConfig", "WebShopEnv", "prepare_catalogue", "write_catalogue"]
