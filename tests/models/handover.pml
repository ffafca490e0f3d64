/* Hand-over of a partition between two members of a group. There is no coordinator: the row of the group, the claim on
   the partition, and each member for itself. A member that is dead or stopped for longer than its lease holds nothing.

   A line with a point of cues/faults.py lets the member A or B run to that point; the other lines are for readers.

   exactly_once   each message is on the output queue once, after the last seek from its place on
   held           the claim of a member that lives and holds the partition is not taken from it
*/
#define MESSAGES 2

mtype = { exactly_once, held }
#define MUST(property, holds) if :: (holds) :: else -> printf("FAILS %e\n", property); assert(false) fi

/* The store: the row of the group and the members (groups/group_rows.py), and the claim (groups/claims.py). */
byte generation, planned;
bool joined[2], lapsed[2];        /* lapsed: the lease has run out, the member is stopped */
byte assignee, holder, epoch, next;
byte outputs[MESSAGES];           /* how often each message is on the output queue since the seek */
#define NOBODY 2
bool entered;                     /* A, which is the first one, has joined */
bool sought;                      /* the operator has acted, or never will */

#define NAME(me) ('A' + (me))
#define LIVES(me) (joined[me] && !lapsed[me])
#define FREE (holder == NOBODY || holder == me || !LIVES(holder))
#ifdef CLAIMS_ANYHOW
#define MAY_CLAIM true
#else
#define MAY_CLAIM FREE
#endif

/* GroupTable.settle: a plan, if members have changed. It prefers the member that joined last, so that there is a
   hand-over. */
inline settle() {
  atomic {
    if
    :: planned != generation ->
       assignee = (LIVES(1) -> 1 : (LIVES(0) -> 0 : me));
       planned = generation;
       printf("%c plans\n", NAME(me))
    :: else
    fi
  }
}

proctype member(byte me) {
  byte my_epoch, my_next, read; bool mine, passes, unknown;

  atomic { me == 0 || entered -> entered = true; joined[me] = true; generation++; printf("%c joins\n", NAME(me)) };   /* GroupTable.join */
  do
  :: atomic { next == MESSAGES && sought ->                       /* Member.leave */
       if :: holder == me -> holder = NOBODY; epoch++ :: else fi;
       joined[me] = false; generation++; break
     }
  :: next < MESSAGES || !sought ->
     /* A look at the group: Holdings.keep_up */
     settle();
     if
     :: atomic { mine && assignee != me ->                        /* GroupTable.release */
          if :: holder == me -> holder = NOBODY; epoch++ :: else fi;
          mine = false; printf("%c releases\n", NAME(me)) }
     :: atomic { !mine && assignee == me && !lapsed[me] && MAY_CLAIM ->               /* GroupTable.claim */
          MUST(held, FREE);
          holder = me; epoch++; my_epoch = epoch; my_next = next; mine = true;
          printf("%c claims\n", NAME(me)) }
     :: atomic { mine && my_next < MESSAGES ->                    /* Session.read_many */
          read = my_next + 1; printf("%c session.before\n", NAME(me)) };
        do
        :: atomic {                                               /* Session.end: GroupTable.moved is the fence */
             passes = (holder == me && epoch == my_epoch && next == my_next);
#ifdef NO_FENCE
             passes = true;
#endif
#ifdef ONLY_OWNER
             passes = (holder == me);
#endif
#ifdef ONLY_EPOCH
             passes = (epoch == my_epoch);
#endif
             if
             :: passes -> outputs[read - 1]++; next = read; printf("%c session.after\n", NAME(me))
             :: else -> printf("%c refused\n", NAME(me))
             fi;
             if
#ifndef NO_REPEAT
             :: passes && !unknown -> unknown = true              /* the answer was lost: the commit is repeated */
#endif
             :: passes -> my_next = read; break
             :: !passes && holder == me -> my_epoch = epoch; my_next = next; break     /* Member.doubt */
             :: !passes && holder != me -> mine = false; break
             fi
           }
        od
     :: else
     fi
  od
}

/* A member is stopped for longer than its lease, and its place is removed (GroupTable.remove); it continues later. */
proctype stopper() {
  if
  :: atomic { joined[0] -> lapsed[0] = true; generation++; printf("A stopped\n") }
  :: true
  fi
}

/* groups.seek, to the first message. */
proctype operator() {
#ifndef NO_SEEK
  byte i;
  if
  :: atomic { next > 0 ->
       next = 0; epoch++;
       for (i : 0 .. MESSAGES - 1) { outputs[i] = 0 };
       i = 0;
       printf("seek 0\n")
     }
  :: true
  fi;
#endif
  sought = true
}

init {
  byte i;
  holder = NOBODY; assignee = NOBODY;
  atomic { run member(0); run member(1); run stopper(); run operator() };
  _nr_pr == 1;
  for (i : 0 .. MESSAGES - 1) { MUST(exactly_once, outputs[i] == 1) }
}
