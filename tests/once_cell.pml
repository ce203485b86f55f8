/* The once-cell of rocmforge.h (section 4) as a model for spin: users that pin and read, an evictor, loads that may fail,
 * copies that fail after READY.
 *     spin -a once_cell.pml && cc -O2 -o pan pan.c && ./pan -m1000000          no error, no invalid end state
 *     spin -DPLAIN_LOAD -a ...                                                 a user that only looks, without a pin:
 *                                                                              the assertion in `use` must fail
 *     spin -DFORGET_WAITERS -DEVICTOR_RESTS -a ...                             nobody is woken: an invalid end state
 *     spin -DFORGET_BROKEN -DEVICTOR_RESTS -a ...                              the last pin of a broken cell wakes nobody
 * One atomic{} here is one atomic operation, or one critical section of the monitor's mutex, in the code. */

#define UNLOADED 0
#define LOADING 1
#define READY 2
#define EVICTING 3
#define BROKEN 4 /* was READY, and its bytes turned out bad */

#ifndef USERS
#define USERS 3
#endif
#ifndef ROUNDS
#define ROUNDS 2 /* uses per user */
#endif

byte state = UNLOADED;
byte pins = 0;         /* state and pins are one word: they are only read and changed together */
bool bytes = false;    /* the tensor's memory is there                                         */
byte loaders = 0;      /* loads in progress                                                    */
bool waiting[USERS];   /* rfi_waiter, linked to the cell                                       */
bool failed[USERS];    /* outcome of the attempt the waiter waited for                         */
bool sleeping[USERS];  /* on the monitor, for the pins of a BROKEN cell to go                      */
byte users_left = USERS;

/* rfi_cell_unpin: the last pin of a BROKEN cell wakes those who want to load it anew */
inline unpin() {
    atomic {
        pins--;
        if
#ifndef FORGET_BROKEN
        :: state == BROKEN && pins == 0 -> wake()
#endif
        :: else
        fi
    }
}

/* a broadcast on the monitor */
inline wake() {
    j = 0;
    do
    :: j < USERS -> sleeping[j] = false; j++
    :: else -> break
    od
}

/* rfi_cell_settle: change the state, give the outcome to every waiter */
inline settle(new_state, failure, pinned) {
    atomic {
        state = new_state;
        if
        :: pinned -> pins++
        :: else
        fi;
        i = 0;
        do
        :: i < USERS ->
            if
#ifndef FORGET_WAITERS
            :: waiting[i] -> waiting[i] = false; failed[i] = failure
#endif
            :: else
            fi;
            i++
        :: else -> break
        od;
        wake()
    }
}

inline use() {
    assert(bytes);
    assert(state == READY || state == BROKEN);
    skip;          /* others may run in between */
    assert(bytes)  /* nobody took it away meanwhile */
}

proctype user(byte id) {
    byte round = 0, i, j;
    bool got;
    do
    :: round < ROUNDS ->
again:
#ifdef PLAIN_LOAD
        atomic { got = (state == READY) };
#else
        atomic { got = (state == READY); pins++ };  /* rfi_cell_try_pin: add first, look at what was there */
        if
        :: !got -> unpin()
        :: else
        fi;
#endif
        if
        :: got ->
            use();
#ifndef PLAIN_LOAD
            unpin();
#endif
            round++
        :: else ->
            /* rfi_cell_claim, in the monitor's mutex */
            atomic {
                if
                :: state == UNLOADED || (state == BROKEN && pins == 0) -> state = LOADING; got = true
                :: state == LOADING || state == EVICTING -> waiting[id] = true; failed[id] = false
                :: state == BROKEN && pins > 0 -> sleeping[id] = true
                :: state == READY
                fi
            };
            if
            :: got ->
                atomic { assert(loaders == 0); bytes = false; loaders++ }; /* what was broken is dropped first */
                if
                :: bytes = true; loaders--;
#ifdef PLAIN_LOAD
                   settle(READY, false, false)
#else
                   settle(READY, false, true);
                   use();
                   unpin();
                   round++
#endif
                :: loaders--; settle(UNLOADED, true, false); round++   /* the load fails: this use is over */
                fi
            :: else ->
                !waiting[id] && !sleeping[id];
                if
                :: failed[id] -> failed[id] = false; round++           /* the attempt failed: its waiters too */
                :: else -> goto again
                fi
            fi
        fi
    :: else -> break
    od;
    users_left--
}

/* a copy fails after its tensor was READY, twice at most */
proctype breaker() {
    byte n = 0;
    do
    :: n < 2 && users_left > 0 -> atomic { if :: state == READY -> state = BROKEN :: else fi }; n++
    :: else -> break
    od
}

proctype evictor() {
    byte i, j;
    bool claimed;
    do
#ifdef EVICTOR_RESTS
    :: break /* for good, at any time: nobody may count on it to be woken */
#else
    :: users_left == 0 -> break
#endif
    :: users_left > 0 ->
        atomic {
            claimed = ((state == READY || state == BROKEN) && pins == 0);
            if
            :: claimed -> state = EVICTING
            :: else
            fi
        };
        if
        :: claimed -> bytes = false; settle(UNLOADED, false, false)
        :: else
        fi
    od
}

init {
    byte n = 0;
    atomic {
        do
        :: n < USERS -> run user(n); n++
        :: else -> break
        od;
        run evictor();
        run breaker()
    }
}
