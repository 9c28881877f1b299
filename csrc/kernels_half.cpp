// The loops for bfloat16 and float16.
#include "kernels-inl.h"

namespace zoo {

INSTANTIATE(bfloat16)
INSTANTIATE(float16)

}  // namespace zoo
