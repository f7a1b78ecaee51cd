"""The ways of devices to their hosts, and which of them share a link."""

import pytest
from panpipe.core.offload.host_links import HostLink, HostLinks, same_links


def test_copy_takes_the_latency_and_the_bytes_at_the_rate_of_its_direction():
    link = HostLink(100.0, 50.0, 0.5)
    assert (link.out_s(200.0), link.back_s(200.0)) == (2.5, 4.5)
    assert link.slowed(0.5) == HostLink(50.0, 25.0, 0.5)


def test_equal_links_are_not_shared():
    links = same_links(3, HostLink(1.0, 1.0))
    assert links.groups == (((0,), float("inf")), ((1,), float("inf")), ((2,), float("inf")))
    assert links.contended() == links


@pytest.mark.parametrize(("share", "rate"), [(1.0, 50.0), (1.5, 75.0), (4.0, 100.0)])
def test_contended_link_has_its_part_of_the_shared_rate_and_never_more_than_its_own(share, rate):
    link = HostLink(100.0, 100.0)
    links = HostLinks((link, link, None), (((0, 1), share), ((2,), float("inf"))))
    assert links.contended().links == (HostLink(rate, rate), HostLink(rate, rate), None)
