/* The commit of a step on a shared directory: records that are put if absent, and the log of a queue, whose entries are
   put if absent too. Two drivers; one may be stopped at any access. Old records are deleted.

   Each line that an action prints is a point of cues/faults.py, or an access, for the driver A, B or the last one, Z.

   exactly_once   each message is in the log of the output queue once
*/
#define MESSAGES 3
#define RECORDS 12
#define KEEP 1

mtype = { exactly_once }
#define MUST(property, holds) if :: (holds) :: else -> printf("FAILS %e\n", property); assert(false) fi

/* The ledger of the processor (ledger.py). Records are counted from 1; 0: none. */
bool there[RECORDS];
byte newest;
byte position[RECORDS];           /* of the processor after the record */
byte file[RECORDS];               /* the message + 1 that the record commits to the queue; 0: none */
/* The log of the queue (directory.py): its last entry, and the last record whose file is in it. */
byte version, published;
byte outputs[MESSAGES];           /* how often each message is in the log */
byte started;

/* QueueDirectory.settle: add the file of a record, if it is not in the log. */
inline settle(number) {
  do
  :: atomic { my_published >= number || file[number] == 0 -> break }
  :: atomic { my_published < number && file[number] != 0 && version == my_version ->
       /* Files.put: the entry my_version + 1 is absent */
       outputs[file[number] - 1]++;
       version++; published = number;
       my_version = version; my_published = published;
       printf("%c spark.forwarded\n", who); break }
#ifdef LOG_OVERWRITES
  :: atomic { my_published < number && file[number] != 0 && version != my_version ->
       /* The entry of another driver is replaced. */
       outputs[file[number] - 1]++;
       my_published = number; printf("%c spark.forwarded\n", who); break }
#else
  :: atomic { my_published < number && file[number] != 0 && version != my_version ->
       my_version = version; my_published = published }           /* QueueDirectory.read_on, and look again */
#endif
  od
}

/* Ledger._put */
inline put(number, to, message) {
  atomic {
    won = !there[number];
#ifdef PUT_OVERWRITES
    won = true;
#endif
    if
    :: won ->
       there[number] = true; position[number] = to; file[number] = message;
#ifndef NO_LATER_LOOK
       won = (newest <= number);
#endif
       newest = (newest > number -> newest : number);
       /* Ledger._trim */
       if
       :: won && newest > KEEP -> for (i : 1 .. newest - KEEP) { there[i] = false }; i = 0
       :: else
       fi
    :: else
    fi
  }
}

proctype driver(byte who) {
  byte last, mine, my_position, my_version, my_published, i; bool won;

  /* Driver.claim */
  atomic { who == 'A' + started || who == 'Z' -> started++; my_version = version; my_published = published; printf("%c opens\n", who) };
  do
  :: won -> break
  :: !won ->
     last = newest;
#ifndef CLAIM_FORWARDS_NOTHING
     settle(last);                                                /* Driver._forward */
#endif
     atomic { mine = last + 1; my_position = position[last]; put(mine, my_position, 0) }
  od;
  printf("%c claim.after\n", who);
  do
  :: my_position == MESSAGES -> break
  :: my_position < MESSAGES ->
     atomic { printf("%c spark.take\n", who) };                   /* 1. Stage.take */
     atomic { printf("%c spark.written\n", who) };                /* 3. the results are files of the queue, in no log */
     /* publish: 4. Commit, Ledger.commit */
     atomic {
       put(mine + 1, my_position + 1, my_position + 1);
       if
       :: won -> mine++; my_position++; printf("%c spark.recorded\n", who)
       :: else -> printf("%c refused\n", who); goto fenced
       fi
     };
     settle(mine)                                                 /* 5. Forward */
  od;
fenced: skip
}

init {
  byte i;
  atomic { run driver('A'); run driver('B') };
  _nr_pr == 1;
  run driver('Z');
  _nr_pr == 1;
  for (i : 0 .. MESSAGES - 1) { MUST(exactly_once, outputs[i] == 1) }
}
