"""Programs that once failed, and other hard ones, a line each."""

from __future__ import annotations

from tests.remat.hunt.judge import ALLOWED, BOTH_RAISE, LIKE_PLAIN, RIGHT
from tests.remat.hunt.programs import Program, program

#: What a program does -> the program.
FOUND: dict[str, Program] = {
    "A product is overwritten through its reshaped output, which counts versions of its own, after relu.":
        program("b = linear(x); d = relu(b)", between="g = set_all(b, f)", returns="bd", loss="d"),
    "A product is overwritten through its reshaped output, which counts its own versions, in a budget.":
        program("b = linear(x); d = sin(b)", between="g = mul_(b)", returns="bd", loss="d", budget=0.3),
    "A chunk of a recomputed value is read after the value itself was read for the last time.":
        program("c = conv(x); h = norm(c); ab = chunk(h); k = half(h); gl = chunk(k); d = add(g, a); d = linear(d)"),
    "A small tensor with a history, the start of a recipe, is returned and overwritten before backward.":
        program("c = conv(x); h = norm(c); a = half(e); h = add(h, a); d = conv(h)",
                between="a = mul_(a)", returns="da", loss="d", smallest_bytes=100),
    "A small saved tensor becomes the input of a recipe that nothing needs, which starts from a copy.":
        program("k = shift(e); c = addcmul(k, y); a = conv1(k); k = matmul(x, c); lah = unbind1(a)",
                returns="h", smallest_bytes=100),
    "The copy of a small saved tensor is freed within forward with the recipe that starts from it.":
        program("a = addcmul(e, f); l = shift(e); c = addcmul(e, l); a = sin(e, l, 1); "
                "k = channels_last(e, l); g = resize(e, a, 1); l = maximum(g, u); l = exp(c, x, 2); "
                "h = pow(k, c, 2); k = elu(g, h)",
                returns="d", smallest_bytes=100),
    "The backward of a function overwrites a recomputed value, which a convolution reads afterwards.":
        program("c = conv(x); c = silu(c); b = conv(c); a = overwrites(c)", returns="ab"),
    "The array that a uint8 input shares its memory with is refilled before backward.":
        program("a = normalized(u); c = conv(a)", between="a = refill_u_(x)"),
    "The array that a float input shares its memory with is refilled between two backward passes.":
        program("a = shift(f); b = norm_eval(f); b = linear(a)", later="g = refill_f_(x)", backward="retained"),
    "A recipe starts from a running mean, which a batch norm then moves without a version.":
        program("h = clamp_by(x); l = minus_mean(x); d = norm(l)"),
    "An operation on a list of tensors overwrites what sigmoid saved.":
        program("l = sigmoid(x); d = foreach_(l)", returns="l"),
    "A registered operator overwrites an input through a detached alias.":
        program("l = elu(x); l = shrink_(x)"),
    "A recomputation of a uint8 square and of its product with a float.":
        program("l = square(u); l = matmul(l, y)"),
    "A sum with a tensor that inference mode made.":
        program("h = inference(x); b = add(x, h)"),
    "A part of a small leaf is read after an alias of another part was overwritten.":
        program("da = split_sizes(e); a = grow_(a); d = bits(d); k = shift(e)", smallest_bytes=100),
    "A function overwrites what it saved, which is kept, before a convolution reads it.":
        program("l = times_parameter(x); b = conv1(l); l = overwrites(l)", returns="lb"),
    "The array that an input shares its memory with is refilled in forward before a recipe reads it.":
        program("a = shift(u); b = shift(a); l = refill_u_(x); d = mul(x, b)"),
    "A recipe starts from a part of a leaf whose memory was overwritten through an alias of that part.":
        program("a = iterate(x); l = out(a); k = conv_depthwise(x); l = masked_fill(x, a)", returns="k"),
    "An empty product of matrices, where the budget is a share.":
        program("h = shift(e); l = shift(h); a = unbind(l); ga = tensor_split(a, 1); h = matmul(a, g); k = shift(e)",
                budget=0.3),
    "A saved view lies on the way of a recipe, and its base is overwritten.":
        program("g = sigmoid(x); a = all(g); g = detach(a); d = div(x, g); l = conv1(a); c = shift(d); "
                "a = tanh_half_(a)",
                returns="c"),
    "Overlapping windows of a tensor are overwritten.":
        program("a = conv1(x); h = unfold(a); l = tanh_(h)", returns="a", budget=0.3),
    "A checkpoint saves what a frozen convolution and a ReLU in place have computed.":
        program("a = frozen_checkpoint(x)"),
    "A norm without weights chooses its kernel by its running statistics, under autocast.":
        program("a = norm_cast_tracked(x)"),
    "A norm of bfloat16 without weights chooses its kernel by its running statistics.":
        program("a = norm_of_bfloat16(x)"),
    "A max pool to one element is enlarged, and then viewed.":
        program("a = wide_max_pool_1(x, y); b = adaptive_avg_pool(a, 2); c = rows(b)"),
    "A max pool to one element has other strides.":
        program("a = wide_max_pool_1(x, y); b = adaptive_avg_pool(a, 1); c = by_stride(b)"),
    "A norm of one image with a stride that nothing reads has other strides.":
        program("a = wide(x, y); a = row(a); a = other_strides(a); b = norm_plain(a); b = by_stride(b)"),
    "An operator under autocast calls a matrix product in its kernel.":
        program("a = spatial_transformer(x)"),
    "The data of an activation is replaced after its use.":
        program("a = conv(x); b = silu(a); b = binarized_(a); c = silu(a); d = conv(c)"),
    "The data of a buffer is replaced after its use.":
        program("c = codebook(x)", is_module=True),
    **{f"A graph with other backward passes: {backward}.": program(
        "a = conv(x); b = norm(a); c = silu(b); d = conv1(c); g = softplus(d); h = product(g, c); k = tanh(h)",
        backward=backward,
    ) for backward in ("retained", "double", "penalty", "parts")},
    "A condition of tensors chooses a branch.":
        program("a = cond(x)"),
    "A loop runs while tensors say so.":
        program("a = while_loop(x)"),
    "Backward runs inside of the recording.":
        program("g = channels_last(x); d = shift(e); a = shift(d); l = maximum(g, a)", is_inside=True),
    # Arrays and other memory that is written while nothing counts versions.
    "Data is overwritten within forward after its use.":
        program("a = conv(x); b = sin(a); c = half(b); l = data_mul_(b); c = sigmoid(c); d = cumsum(b); g = add(c, d)"),
    "Running statistics change before backward.":
        program("a = conv(x); b = norm(a); c = relu(b); d = conv1(c)", between="l = norm(x)", forwards=2),
    "The array of a clone is written.":
        program("a = conv(x); b = relu(a); c = clone(b); l = numpy_(c); d = conv1(c)"),
    "The array of an output that autograd does not save is written.":
        program("a = conv(x); b = half(a); l = numpy_(b); d = conv1(b)"),
    "The array of a clone is written, and the clone is read several times.":
        program("a = conv(x); b = tanh(a); c = clone(b); l = numpy_half_(c); d = sigmoid(c); g = product(d, c); "
                "h = tanh(c); "
                "k = add(g, h); k = conv1(k)"),
    "The array of a view is written.":
        program("a = conv(x); b = silu(a); l = numpy_half_(b); cd = chunk(b); g = sin(c); h = product(d, c); "
                "k = cat(g, h); "
                "k = conv1(k)"),
    "The arrays of two clones of a tensor are written.":
        program("a = conv(x); b = tanh(a); c = clone(b); l = numpy_(c); d = clone(c); l = numpy_(d); b = exp(b); "
                "c = exp(c); "
                "d = exp(d); g = add(b, c); g = add(g, d)"),
    "Memory shared with other processes is written.":
        program("a = conv(x); b = sigmoid(a); c = clone(b); l = share_(c); l = numpy_(c); d = exp(c)"),
    "Running statistics are read before and after a norm moves them.":
        program("a = minus_mean(x); b = sigmoid(a); c = norm(b); d = minus_mean(c); d = sigmoid(d); g = product(b, d)"),
    "A buffer is overwritten at the start of each of two passes.":
        program("l = big_add_(x); a = conv(x); b = plus_big(a); c = sigmoid(b); d = conv1(c)", forwards=2,
                is_module=True),
    "An input of a recipe is overwritten before the recipe is saved.":
        program("a = conv(x); b = shift(a); l = mul_(a); c = conv1(b); d = conv1(a)", returns="cd"),
    "The data of an activation is replaced twice.":
        program("a = conv(x); b = tanh(a); l = binarized_(b); l = halved_(b); c = sigmoid(b); d = product(c, b); "
                "d = relu(d)"),
    "The data of a parameter is replaced between two uses.":
        program("b = times_parameter(x); b = sigmoid(b); l = parameter_replaced_(x); c = tanh(b); "
                "d = times_parameter(c)"),
    "The data of a codebook is replaced between two uses.":
        program("b = embedded(x); c = product(x, b); c = sigmoid(c); l = parameter_replaced_(x); d = relu(b); "
                "d = product(c, d)"),
    "An embedding overwrites its parameter in two calls.":
        program("a = renormed(x); b = gelu(a); c = linear(b); d = tanh(c); a = renormed(x, 2); b = gelu(a); "
                "c = linear(b); "
                "b = tanh(c); g = product(b, d)"),
    "An embedding overwrites its parameter in two passes.":
        program("a = renormed(x); b = gelu(a); c = linear(b); d = tanh(c)", forwards=2),
    # Settings of kernels.
    "oneDNN is off for a part of forward.":
        program("a = conv(x); l = onednn_off_(x); b = gelu(a); l = leave_(x); c = half(b); c = gelu(c); "
                "l = onednn_off_(x); "
                "d = sin(c); d = gelu(d); g = product(d, c)"),
    "oneDNN is off in forward and on in backward.":
        program("l = onednn_off_(x); a = conv(x); b = gelu(a); c = conv1(b)"),
    **{f"The default dtype within forward is float64 for {name}{end and ' alone'}.": program(
        f"a = double(x); a = times_parameter(a); a = sigmoid(a); l = double_on_(x); b = {name}(u); "
        f"c = product(a, b); {end} d = tanh(c); d = product(c, d)"
    ) for name in ("scaled", "half", "sigmoid", "sqrt", "normalized") for end in ("", "l = leave_(x);")},
    # Transforms, subclasses, and tensors without a version.
    **{f"A recipe contains the result of {name}.": program(
        f"a = conv(x); b = relu(a); b = shift(b); c = {name}(b); c = sigmoid(c); d = product(c, b); d = tanh(d)"
    ) for name in ("func_grad", "func_vjp", "vmap", "jvp")},
    **{f"An inference tensor with other data is {name}.": program(f"a = conv(x); b = inference_data(a); {steps}")
       for name, steps in {
        "read": "c = add(a, b)",
        "an input of a recipe": "g = sin(b); g = exp(g); c = add(a, g); c = sigmoid(c); h = clone(b); "
                "d = product(c, h)",
        "concatenated": "c = cat(a, b); c = sin(c)",
        "written into another tensor": "c = clone(a); l = add2_(c, b); b = tanh(b); l = mul2_(c, b); d = sigmoid(c)",
    }.items()},
    "Jagged tensors.": program("a = jagged(x); b = relu(a)"),
    "Nested tensors.": program("a = nested(x); b = relu(a)"),
    "Sparse tensors.": program("a = sin(x); a = relu(a); b = sparse(a); c = sparse_mm(a); b = sin(b); "
                "d = matmul(c, b)"),
    **{f"A product is overwritten through its alias after {name}, and was enlarged before.": program(
        f"a = linear(x); b = {name}(a); c = double(b); c = untag(c); d = relu(c); g = sin(c); d = add(d, g); "
                "h = tanh(c); "
        "d = add(d, h); d = times_parameter(d)", between="l = no_grad_add_(b)", returns="bd", loss="d"
    ) for name in ("tag", "made", "as_weight")},
    # Conjugated views, with and without a subclass that returns new objects for the same elements.
    **{f"Conjugated views: {name}{tag and ', tagged'}.": program(f"a = complex(x); a = tanh(a); {tag} {steps}; "
                "k = abs(k)")
       for tag in ("", "a = tag(a);") for name, steps in {
        "product": "b = conj(a); k = product(a, b)",
        "matrix product": "b = mH(a); c = matmul(a, b); k = tanh(c)",
        "imaginary parts": "b = imag(a); c = conj(a); c = imag(c); d = product(b, c); d = sin(d); g = abs(a); "
                "k = product(d, g)",
        "complex of parts": "b = imag(a); c = conj(a); c = imag(c); d = to_complex(b, c); d = tanh(d); g = conj(a); "
                            "g = clone(g); k = product(d, g)",
        "resolved": "b = conj(a); b = resolved(b); b = clone(b); c = clone(a); b = product(b, c); d = row(a); "
                "d = conj(d); "
                    "k = product(b, d)",
    }.items()},
    "The pseudoinverse conjugates inside of its kernel.": program("a = complex(x); b = pinv(a); b = resolved(b); "
                "c = real(b)"),
    # Second derivatives of complex functions read conjugated and negated views.
    **{f"Second derivatives: {name}, {backward}.": program(
        f"a = complex(x); c = complex(y); a = tanh(a); {steps}; k = abs(k)", backward=backward
    ) for backward in ("double", "penalty") for name, steps in {
        "product": "b = product(a, c); k = product(b, a)",
        "matrix product": "d = mH(c); b = matmul(a, d); b = tanh(b); k = matmul(b, c)",
        "exp": "b = product(a, c); k = complex_exp(b)",
        "quotient": "b = product(a, c); k = quotient(a, b)",
        "sigmoid": "b = product(a, c); b = sigmoid(b); k = product(b, a)",
        "power": "b = product(a, c); b = pow(b); d = conj(a); k = product(b, d)",
        "imaginary part": "b = product(a, c); b = imag(b); b = sin(b); d = imag(a); k = product(b, d)",
        "negated imaginary part": "b = conj(a); b = imag(b); b = sin(b); d = product(a, c); d = conj(d); d = imag(d); "
                                  "k = product(b, d); k = exp(k)",
        "stft": "b = product(a, c); b = stft(b); k = tanh(b)",
        "convolution": "a = transpose(a); b = tanh(a); b = transpose(b); d = complex_conv(b); k = tanh(d)",
    }.items()},
    # Frozen layers and ReLUs whose outputs are saved in several ways.
    **{f"A frozen layer before {name}.": program(f"a = {name}(x)") for name in (
        "frozen_reentrant", "frozen_on_cpu", "frozen_saves", "frozen_middle", "frozen_shows", "frozen_operator"
    )},
    "A function saves the ReLU of the output of a function that saved the output of a frozen layer.":
        program("a = frozen_saves(x); b = relu(a); c = saves(b); d = conv(c)"),
    "A ReLU saves its output through other hooks.":
        program("a = frozen_relu(x); l = hooks_on_(x); b = relu(a); l = leave_(x); c = saves(b); d = conv(c)"),
    "Other operations read tensors that frozen layers do not.":
        program("a = product(x, y); b = conv_frozen(a); c = relu(b); d = conv_frozen(b); d = relu(d); "
                "g = conv_frozen(c); "
                "g = product(g, c); h = max_pool(d); k = exp(d); h = product(h, k); g = add(g, h); l = saves(g); "
                "k = conv_frozen(g); k = product(k, g)"),
    "The input of a frozen layer is overwritten.":
        program("a = conv_frozen(y); a = half(a); "
                "b = conv_frozen(a)", between="l = no_grad_add_(a)", returns="ab", loss="b"),
    "The input of a frozen layer is overwritten, and another operation has saved it.":
        program("a = conv_frozen(y); a = half(a); b = tanh(a); b = product(b, a)", between="l = no_grad_add_(a)",
                returns="ab", loss="b"),
    "Second derivatives of frozen layers.":
        program("a = conv(x); b = frozen_norm_relu(a); c = frozen_relu(b); d = max_pool(c); "
                "d = conv1(d)", backward="double"),
    "A norm under autocast has the kernel of forward.":
        program("l = autocast_on_(x); a = conv(x); b = norm(a); c = sigmoid(b)"),
    # Steps that differ from the recorded one.
    **{f"Another step: {name}.": program(f"a = conv(x); b = gelu(a); {steps}; d = sigmoid(c)",
                                         other=f"a = conv(x); b = gelu(a); {other}; d = sigmoid(c)", turn=2)
       for name, (steps, other) in {
        "scalar": ("c = times_k(b)", "c = times_k(b, 2)"), "alpha": ("c = add_k(b, a)", "c = add_k(b, a, 2)"),
        "slice": ("c = slice(b)", "c = slice(b, 1)"), "shift": ("c = roll_k(b)", "c = roll_k(b, 2)"),
        "indices": ("c = gather_k(b)", "c = gather_k(b, 2)"), "swapped": ("c = sub(a, b)", "c = sub(b, a)"),
        "constant": ("c = times_array(b)", "c = times_array(b, 1)"),
        "dropout": ("c = dropout_k(b)", "c = dropout_k(b, 2)"),
        "shorter": ("c = exp(b); c = tanh(c)", "c = tanh(b)"), "longer": ("c = silu(b)", "c = conv1(b); c = silu(c)"),
        "branch": ("c = silu(b)", "c = conv1(b); c = gelu(c); c = tanh(c)"),
        "same sizes": ("c = conv1(b); c = silu(c); c = add(c, b)", "c = conv(b); c = gelu(c); c = product(c, b)"),
        "order": ("c = tanh(y); g = sin(b); c = product(g, c)", "g = sin(b); c = tanh(y); c = product(g, c)"),
        "autocast": ("c = conv1(b)", "l = autocast_on_(x); c = conv1(b); l = leave_(x)"),
        "detached": ("c = product(b, a)", "c = detach(b); c = product(c, a)"),
        "data of a parameter": ("c = times_parameter(b)", "l = parameter_replaced_(x); c = times_parameter(b)"),
        "written buffer": ("c = plus_big(b)", "c = plus_big(b); c = sigmoid(c); l = big_copy_(b); g = times_big(b); "
                           "c = product(c, g)"),
        "written parts": ("c = clone(b); l = set(c, a)", "c = clone(b); l = copy_half_(c, a, 1); l = set(c, a); "
                "c = sin(c)"),
        "without gradients": ("c = tanh(b)", "l = no_grad_on_(x); c = tanh(y); l = leave_(x); c = product(b, c)"),
        "gradients in part": ("c = tanh(b)", "c = tanh(b); l = detach(b); c = product(c, l)"),
    }.items()},
    **{f"Each step differs: {name}.": program(f"a = conv(x); b = gelu(a); c = {name}(b, a); d = sigmoid(c)", turn=2)
       for name in ("times_item", "random_depth", "random_mask", "positive_columns")},
    **{f"Another step: {turns}.": program(
        "a = conv(x); b = gelu(a); c = norm(b); d = sigmoid(c); g = conv1(d); h = product(g, d)", turn=2, turns=turns,
        is_module=turns == "fails"
    ) for turns in ("frozen", "narrow", "fails", "budget")},
}  # fmt: skip
#: Programs with other verdicts than right, with a budget or without. Plain training raises or is wrong too, or a
#: RecipeError names what was overwritten.
VERDICTS: dict[str, tuple[str, ...]] = {
    **{name: (RIGHT, ALLOWED) for name in FOUND if name.startswith("A product is overwritten through")},
    **{name: (RIGHT, BOTH_RAISE) for name in FOUND if name.startswith((
        "The backward of a function overwrites", "A function overwrites what it saved",
        "A product is overwritten through its reshaped output, which counts its own versions, in a budget.",
    ))},
    **{name: (BOTH_RAISE,) for name in FOUND if name.endswith(("overwritten, and another operation has saved it.",
                                                               "an input through a detached alias."))},
    "An operation on a list of tensors overwrites what sigmoid saved.": (RIGHT, BOTH_RAISE),
    "The data of a parameter is replaced between two uses.": (LIKE_PLAIN,),
    **{name: (RIGHT, LIKE_PLAIN) for name in FOUND if name.startswith(("Conjugated views", "Second derivatives"))},
}  # fmt: skip
