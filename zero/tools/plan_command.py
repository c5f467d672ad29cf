"""x"""
def add_parser(subparsers): pass
