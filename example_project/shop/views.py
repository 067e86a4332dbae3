"""The shop's JSON door."""

import json
from decimal import Decimal, InvalidOperation

from django.db import IntegrityError
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .payments import PaymentRefused
from .services import place_order

MAX_TOTAL = Decimal(10**8)  # what the column holds


@csrf_exempt  # an API without cookies: there is no session a foreign page could ride on
@require_POST
def orders(request: HttpRequest) -> JsonResponse:
    """Place an order: ``{"number": "A-1", "total": "12.50", "card": "..."}``.

    201 placed, 400 not such an object, 402 payment refused, 409 the number is taken.
    """
    try:
        asked = json.loads(request.body)
        number, total, card = str(asked["number"]), Decimal(asked["total"]), str(asked["card"])
        if not 0 < total < MAX_TOTAL:
            raise ValueError
    except (ValueError, KeyError, TypeError, InvalidOperation):
        return JsonResponse({"error": "send number, total and card"}, status=400)
    try:
        order = place_order(number, total, card)
    except PaymentRefused:
        return JsonResponse({"error": "payment refused"}, status=402)
    except IntegrityError:
        return JsonResponse({"error": "this number is taken"}, status=409)
    return JsonResponse({"order": order.number}, status=201)
