"""Plain English written for these tests: several subjects, so that a model is neither sure nor lost."""

PASSAGES = (
    "The harbour woke before the town did. Men in heavy coats pulled crates of silver fish from the boats, counting "
    "aloud, while gulls argued over whatever fell between the planks. By the time the bakery opened its shutters, the "
    "first trucks were already climbing the hill towards the market, and the street behind them smelled of salt, "
    "diesel and bread. Nobody spoke much. Work at that hour was a kind of silence that everyone shared.",
    "Photosynthesis is the process by which plants, algae and some bacteria turn light into chemical energy. Inside "
    "the leaf, chlorophyll absorbs mostly red and blue light and passes its energy on to a chain of proteins. Water is "
    "split, oxygen is released, and the energy is stored in molecules that later help to build sugar from carbon "
    "dioxide. Almost all life on Earth depends on this reaction, directly or through the food that it makes possible.",
    "To make a simple vegetable soup, chop an onion, two carrots and a stick of celery. Heat a spoonful of oil in a "
    "large pot and cook the vegetables slowly until they are soft but not brown. Add a litre of water, a little salt, "
    "a bay leaf and two potatoes cut into small cubes. Let the soup simmer for twenty minutes, then taste it and add "
    "pepper, chopped parsley and a few drops of lemon juice before you serve it with toasted bread.",
    "A computer program is a list of instructions that tells a machine what to do. The machine follows them one "
    "after another, very quickly and without understanding any of them. If the list is wrong, the result is wrong "
    "too, however fast it arrives. That is why programmers spend more time reading than writing: they look for "
    "the place where what they said and what they meant are not the same. A good test is a question whose answer "
    "is known in advance.",
    "In the winter of that year the river froze from one bank to the other, which the oldest people of the village had "
    "seen only once before. Children crossed to the far side with sledges and came back with stories. The miller, who "
    "could not grind without running water, walked up and down beside his silent wheel and complained about the price "
    "of flour. When the ice finally broke in March, the sound was heard three miles away.",
    "The committee met on Tuesday to discuss the new bridge. The engineers had prepared two plans: a steel bridge that "
    "would be cheaper to build, and a concrete one that would be cheaper to keep. After a long debate about traffic, "
    "noise and the view from the old castle, the members voted for the second plan by nine votes to four. Work is "
    "expected to begin next spring and should take about eighteen months if the weather allows it.",
)
