"""The recipes: `recipes/<domain>/<name>.py`. What the recipes of a domain share is in folders beside them."""

if __name__ == "recipes":  # imported by its name in a checkout
    from trainworthy import checkout

    checkout.alias(__name__)
