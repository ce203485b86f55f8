# internals.awk: rocmforge.h for suites that look inside, which then share one compiled implementation. With -v bodies=1 its
# functions without `static`, to be compiled once; else these as declarations. Lines keep their numbers. A function begins in
# the first column and ends with a } there; what is inline, a table or made by a macro stays as it is.
BEGIN { if (bodies) print "#line 1 \"rocmforge.h\"" }
body { if (/^}/) body = 0; print bodies ? $0 : ""; next }
/^(static |ROCMFORGE_API )?[a-z][^=([{;]*\(/ && !/^(static inline|typedef) / { head = 1; sub(/^static /, "") }
head && / \{/ { head = 0; body = !/}$/; if (!bodies) sub(/ \{.*/, ";") }
head && /\);/ { head = 0 }
{ print }
