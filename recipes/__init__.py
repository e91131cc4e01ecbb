"""The recipes: `recipes/<domain>/<name>.py`. Code that the recipes of a domain share is in subfolders."""

if __name__ == "recipes":  # imported by its name in a checkout
    from trainworthy import checkout

    checkout.alias(__name__)
