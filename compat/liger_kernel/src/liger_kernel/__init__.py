"""Liger-Kernel's name for tigon. All modules are those of `tigon.as_liger`, which takes this one's place."""

import tigon.as_liger

tigon.as_liger.install()
