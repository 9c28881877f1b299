// The loops for float32 and float64.
#include "kernels-inl.h"

namespace zoo {

INSTANTIATE(float)
INSTANTIATE(double)
template void line_part(const LineJob<float>&, Range);
template void line_part(const LineJob<double>&, Range);

}  // namespace zoo
