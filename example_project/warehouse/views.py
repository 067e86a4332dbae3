"""The warehouse's door for messages about orders."""

import json
from decimal import Decimal, InvalidOperation

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .services import book_once
from .signatures import Unauthenticated, authenticate
from .trouble import trouble


@csrf_exempt  # the signature says who sent it
@require_POST
def receive_order(request: HttpRequest) -> HttpResponse:
    """Book the order a signed message tells of.

    200 booked, now or before; 401 not signed by a known sender; 400 signed, but not an order.
    """
    try:
        sender, message_id = authenticate(request)
    except Unauthenticated:
        return HttpResponse(status=401)
    if settings.WAREHOUSE_TROUBLE and (status := trouble.status_for(message_id)):
        return HttpResponse(status=status)
    try:
        message = json.loads(request.body)
        order, total = str(message["order"]), str(Decimal(message["total"]))
    except (ValueError, KeyError, TypeError, InvalidOperation):
        return HttpResponse(status=400)
    book_once(sender, message_id, order, total)
    return HttpResponse(status=200)
