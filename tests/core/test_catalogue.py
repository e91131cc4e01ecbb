"""The catalogue of silent bugs: each is planted or says why not, and its page says what the suite does."""

from tests.helpers.catalogue import PAGE, WITHOUT, looked, page, planted


def test_every_bug_is_planted_and_every_control_stands():
    bugs = planted()
    assert {bug for bug, plants in bugs.items() if not plants} == set(WITHOUT)
    assert not [control for control, variants in looked().items() if not variants]


def test_the_page_is_that_of_this_suite():
    assert PAGE.read_text() == page(), "python -m tests.helpers.catalogue"
